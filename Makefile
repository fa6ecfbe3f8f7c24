# Everlift: `make help` lists what is here. Everything runs in .venv, which is made when it is missing.

PYTHON ?= python3
VENV := .venv
# A second environment: protobuf 6's compiler and the linter. The stubs are made here, so that they run on
# protobuf 6 and 7, and the client library is tested here on protobuf 6.
PROTO_VENV := .venv-proto
# A third one: other people's clients, of which one wants protobuf 6.
CLIENTS_VENV := .venv-clients
# A coding agent, which is large.
AGENT_VENV := build/agent
# Those of what Everlift is compared with.
PEERS := build/peers
# Of which files each is made.
MADE_OF := pyproject.toml constraints.txt
PROTO_MADE_OF := proto/requirements.txt
CLIENTS_MADE_OF := tests/clients/requirements.txt
AGENT_MADE_OF := tests/clients/agent.txt
VLLM_PINS := benchmarks/peers/vllm.txt
GUIDELLM_PINS := benchmarks/peers/guidellm.txt
RAY_LLM_PINS := $(VLLM_PINS) benchmarks/peers/ray_llm.txt
MAKE_PEER := benchmarks/peers/make.sh
# An environment is made again when what these files hold has changed. Their times say nothing: a clone's are all new.
unless_current = $(shell cat $(2) | cksum | cmp -s - $(1)/.installed || echo changed)
BIN := $(VENV)/bin
PROTO_BIN := $(PROTO_VENV)/bin
PROTOS := $(sort $(wildcard proto/everlift/v1/*.proto))
# A contract of others, that customers who import everlift need not have.
SERVER_PROTOS := $(sort $(wildcard router/api/kserve/v2/*.proto))
# The contract of the last release.
CONTRACT := proto/contract.binpb
TORCH := 2.13.0
# The tests in ANYWHERE do not depend on real time: any free process runs the next one. There is one process more than cores,
# and at most four, because a test may wait for its servers. Tests of whole clusters run by file, three files at a time, in
# the order of their names.
PROCESSES := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
ANYWHERE := tests/unit tests/property tests/contract tests/continuation
# Tests of the project's own files, which make check runs.
PROJECT := tests/unit/project

# If this is set, Python writes no .pyc files, and each process of a cluster compiles all modules when it starts.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: changed help install demo image test test-image test-long test-vllm e2e-ray-up soak soak-engine bench-ledger bench-router bench-durability bench-long-prompt bench-start bench-autoscale bench-locality bench-takeover bench-preemption bench-load bench-linear bench-int8 bench-weights bench-swap bench-speculation bench-scheduler bench-explain bench-retention bench-scheduling bench-batching bench-prediction bench-overload bench-first-token bench-threads bench-engine bench-online bench-attention bench-collectives bench-console bench-generator picture-console bench-gpu bench-gpu-product check lint types imports proto proto-release proto-check chart chart-check texts lock clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## /  \1\t/' | expand -t 16

install: $(VENV)/.installed ## create .venv with everything that Everlift needs

$(VENV)/.installed: $(call unless_current,$(VENV),$(MADE_OF))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Everlift needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing Everlift into $(VENV): one to several minutes the first time"
	@command -v nvidia-smi >/dev/null || \
	  $(BIN)/pip install -q --no-deps torch==$(TORCH)+cpu 2>/dev/null || \
	  $(BIN)/pip install -q --no-deps torch==$(TORCH)+cpu --retries 1 \
	    --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || \
	  echo "no CPU build of torch $(TORCH) found: taking the package index's own"
	$(BIN)/pip install -q -e '.[dev]' -c constraints.txt
	@$(BIN)/everlift download smollm2 >/dev/null || echo "smollm2, which make demo needs, was not downloaded: run $(BIN)/everlift download smollm2"
	@cat $(MADE_OF) | cksum > $@

$(PROTO_VENV)/.installed: $(call unless_current,$(PROTO_VENV),$(PROTO_MADE_OF))
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_BIN)/pip install -q -r $(PROTO_MADE_OF)
	@cksum < $(PROTO_MADE_OF) > $@

$(CLIENTS_VENV)/.installed: $(call unless_current,$(CLIENTS_VENV),$(CLIENTS_MADE_OF))
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/pip install -q -r $(CLIENTS_MADE_OF)
	@cksum < $(CLIENTS_MADE_OF) > $@

$(AGENT_VENV)/.installed: $(call unless_current,$(AGENT_VENV),$(AGENT_MADE_OF))
	$(PYTHON) -m venv $(AGENT_VENV)
	$(AGENT_VENV)/bin/pip install -q -r $(AGENT_MADE_OF)
	@cksum < $(AGENT_MADE_OF) > $@

$(PEERS)/vllm/.installed: $(call unless_current,$(PEERS)/vllm,$(MAKE_PEER) $(VLLM_PINS))
	$(MAKE_PEER) $(PYTHON) $(PEERS)/vllm $(VLLM_PINS)
	@cat $(MAKE_PEER) $(VLLM_PINS) | cksum > $@

$(PEERS)/ray-llm/.installed: $(call unless_current,$(PEERS)/ray-llm,$(MAKE_PEER) $(RAY_LLM_PINS))
	$(MAKE_PEER) $(PYTHON) $(PEERS)/ray-llm $(RAY_LLM_PINS)
	@cat $(MAKE_PEER) $(RAY_LLM_PINS) | cksum > $@

$(PEERS)/guidellm/.installed: $(call unless_current,$(PEERS)/guidellm,$(MAKE_PEER) $(GUIDELLM_PINS))
	$(MAKE_PEER) $(PYTHON) $(PEERS)/guidellm $(GUIDELLM_PINS)
	@cat $(MAKE_PEER) $(GUIDELLM_PINS) | cksum > $@

demo: $(VENV)/.installed ## start a local cluster, kill a worker, and show that no token is lost
	@$(BIN)/everlift demo --picture build/demo.png

test: $(VENV)/.installed $(PROTO_VENV)/.installed $(CLIENTS_VENV)/.installed $(AGENT_VENV)/.installed ## run the tests (20 minutes on 2 cores with AVX2)
	$(BIN)/pytest -q -m "not long and not soak and not ray_up and not image" -n $(PROCESSES) --dist=worksteal $(ANYWHERE) \
	  --ignore=$(PROJECT)
	$(BIN)/pytest -q -m "not long and not soak and not ray_up and not image" -n 3 --dist=loadfile --no-loadscope-reorder \
	  $(addprefix --ignore=,$(ANYWHERE))

test-long: $(VENV)/.installed $(PROTO_VENV)/.installed $(CLIENTS_VENV)/.installed $(AGENT_VENV)/.installed ## run the long tests and a short soak test (takes hours)
	$(BIN)/pytest -q -m "long and not soak" -n $(PROCESSES) --dist=worksteal $(ANYWHERE)
	$(BIN)/pytest -q -m "long and not soak" -n 2 --dist=loadfile --no-loadscope-reorder $(addprefix --ignore=,$(ANYWHERE))
	SOAK_MINUTES=$${SOAK_MINUTES:-2} FUZZ_CASES=$${FUZZ_CASES:-100000} SCHEMAS=$${SCHEMAS:-10000} $(BIN)/pytest -q -m soak
	EXAMPLES=2 $(BIN)/pytest -q -m "not long and not soak" -n $(PROCESSES) --dist=worksteal --timeout=1800 \
	  tests/property tests/continuation tests/unit/router/chat/parsers tests/integration/router/console

# vLLM's environment also has Everlift, without what Everlift itself requires, the version of Ray that Everlift pins, and
# pytest.
$(PEERS)/vllm/.everlift: $(PEERS)/vllm/.installed pyproject.toml constraints.txt
	$(PEERS)/vllm/bin/pip install -q --no-deps -e .
	$(PEERS)/vllm/bin/pip install -q --no-deps -c constraints.txt ray msgpack
	$(PEERS)/vllm/bin/pip install -q pytest==9.2.0
	@touch $@

SMOLLM2 = build/bench/models/smollm2-instruct/model.safetensors

$(SMOLLM2): $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python -c "from benchmarks.int8_accuracy import ensure_model; ensure_model()"

# Each part of the first tests has a process of its own, because vLLM has global state.
test-vllm: $(VENV)/.installed $(PEERS)/vllm/.everlift $(SMOLLM2) ## run the tests of vLLM as the engine of workers, in an environment with its CPU build
	for part in interfaces core models lora images; do \
	  OMP_WAIT_POLICY=PASSIVE $(PEERS)/vllm/bin/python -m pytest -q -c /dev/null --rootdir=. --noconftest -p no:cacheprovider \
	    tests/vllm_engine/test_vllm_$$part.py || exit 1; \
	done
	EVERLIFT_VLLM_PYTHON=$(PEERS)/vllm/bin/python $(BIN)/pytest -q -s \
	  tests/vllm_engine/test_vllm_cluster.py tests/vllm_engine/test_vllm_image_cluster.py tests/vllm_engine/test_vllm_ray.py

image: ## build the container image with docker or buildah; VARIANT=cpu for CPUs
	@tools/build_image.sh $(or $(VARIANT),cuda)

test-image: $(VENV)/.installed ## build the image for CPUs on a base of Debian packages, and run it (as root, with buildah, debootstrap, bubblewrap)
	$(BIN)/pytest -q -s -m image tests/image

e2e-ray-up: $(VENV)/.installed ## run ray up over ssh on hosts made of namespaces (Linux, as root, with iproute2, openssh-server, rsync)
	$(BIN)/pytest -q -s -m ray_up tests/ray_up

soak: $(VENV)/.installed ## send FUZZ_CASES (1,000,000) malformed inputs, then inject random faults for SOAK_MINUTES (30), and watch memory
	FUZZ_REPORT=build/bench/fuzz.json $(BIN)/pytest -q -s tests/soak/test_fuzz.py
	SOAK_REPORT=build/bench/soak.json $(BIN)/pytest -q -s tests/soak/test_cluster.py
	SOAK_REPORT=build/bench/soak_memory.json $(BIN)/pytest -q -s tests/soak/test_memory.py

soak-engine: $(VENV)/.installed ## run random models and request histories, SOAK_MINUTES (10) for each kind, and SCHEMAS (100,000) JSON schemas
	$(BIN)/pytest -q -s tests/soak/test_engine.py tests/soak/test_models.py tests/soak/test_ledger.py
	$(BIN)/pytest -q -s tests/soak/test_json_schema.py

bench-ledger: $(VENV)/.installed ## measure the cost of an engine step in the ledger (build/bench/ledger.json)
	PYTHONPATH=. $(BIN)/python benchmarks/ledger_step.py

bench-router: $(VENV)/.installed ## measure the throughput of a router on one core, also against Ray Serve (build/bench/router.json)
	PYTHONPATH=. $(BIN)/python benchmarks/router_cost.py

bench-durability: $(VENV)/.installed ## compare sending tokens before and after they are stored in the ledger (build/bench/durability.json)
	PYTHONPATH=. $(BIN)/python benchmarks/durability.py

bench-preemption: $(VENV)/.installed ## compare moving preempted requests with letting them wait (build/bench/preemption.json)
	PYTHONPATH=. $(BIN)/python benchmarks/preemption.py

bench-long-prompt: $(VENV)/.installed ## measure the delay of streams by prompts of 200,000 tokens (build/bench/long_prompt.json)
	PYTHONPATH=. $(BIN)/python benchmarks/long_prompt.py

bench-start: $(VENV)/.installed ## measure the start of a worker until it accepts requests, by part (build/bench/worker_start.json)
	PYTHONPATH=. $(BIN)/python benchmarks/worker_start.py

bench-first-token: $(VENV)/.installed ## measure the time from the start of a process to its first token (build/bench/first_token.json)
	PYTHONPATH=. $(BIN)/python benchmarks/first_token.py

bench-threads: $(VENV)/.installed ## compare how idle OpenMP threads wait beside a busy process (build/bench/threads.json)
	PYTHONPATH=. $(BIN)/python benchmarks/threads.py

bench-autoscale: $(VENV)/.installed ## run the autoscaler under changing load, with fake GPUs (build/bench/autoscale.json, .png)
	PYTHONPATH=. $(BIN)/python benchmarks/autoscale.py

bench-locality: $(VENV)/.installed ## compare dispatch by cached prefix with other routers' policies, in virtual time; about an hour (build/bench/locality.json, .png)
	PYTHONPATH=. $(BIN)/python benchmarks/locality.py $(ARGS)

bench-takeover: $(VENV)/.installed ## measure the start of a new leader with few and with 1,000,000 queued requests (build/bench/takeover.json)
	PYTHONPATH=. $(BIN)/python benchmarks/takeover.py

bench-load: $(VENV)/.installed ## measure the loading of a checkpoint (build/bench/load.json)
	PYTHONPATH=. $(BIN)/python benchmarks/load_memory.py

bench-linear: $(VENV)/.installed ## measure matrix products with packed weights on a CPU (build/bench/linear.json)
	OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=500 PYTHONPATH=. $(BIN)/python benchmarks/linear_layers.py

bench-attention: $(VENV)/.installed ## compare the compiled attention kernel for CPUs with torch (build/bench/attention.json)
	PYTHONPATH=. $(BIN)/python benchmarks/attention_kernel.py

bench-int8: $(VENV)/.installed ## measure accuracy and speed of int8 weights with SmolLM2-135M-Instruct (build/bench/int8.json)
	PYTHONPATH=. $(BIN)/python benchmarks/int8_accuracy.py $(ARGS)

bench-weights: $(VENV)/.installed ## measure decoding with quantised weights and with experts on a CPU (build/bench/weight_formats.json)
	OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=500 PYTHONPATH=. $(BIN)/python benchmarks/weight_formats.py $(ARGS)

bench-swap: $(VENV)/.installed ## compare recomputing and swapping of preempted requests (build/bench/swap.json)
	PYTHONPATH=. $(BIN)/python benchmarks/swap.py

bench-speculation: $(VENV)/.installed ## measure speculative decoding with n-gram drafts on the demo model (build/bench/speculation.json)
	PYTHONPATH=. $(BIN)/python benchmarks/speculation.py

bench-scheduling: $(VENV)/.installed ## measure batching, queue orders, placement and the accuracy of forecasts; 80 minutes (build/bench/scheduling.json, .png)
	PYTHONPATH=. $(BIN)/python benchmarks/scheduling/scheduling.py

bench-batching: $(VENV)/.installed ## compare static and continuous batching, chunked prefill, and SLAI (build/bench/batching*.json, .png)
	PYTHONPATH=. $(BIN)/python benchmarks/batching.py --virtual --out build/bench/batching_virtual.json
	PYTHONPATH=. $(BIN)/python benchmarks/batching.py

bench-prediction: $(VENV)/.installed ## measure accuracy and cost of output length prediction (build/bench/prediction.json)
	PYTHONPATH=. $(BIN)/python benchmarks/prediction.py

bench-overload: $(VENV)/.installed ## measure goodput under overload, in virtual time (build/bench/overload.json)
	PYTHONPATH=. $(BIN)/python benchmarks/overload.py

bench-console: $(VENV)/.installed ## measure the cost of the console for a router and a browser, with 1,000 workers (build/bench/console.json)
	PYTHONPATH=. $(BIN)/python benchmarks/console.py

picture-console: $(VENV)/.installed ## draw the README's picture of the console, of a cluster under Ray (pictures/console.png)
	PYTHONPATH=. $(BIN)/python -W ignore tests/support/router/console_picture.py

bench-scheduler: $(VENV)/.installed ## measure the cost of a step without the model (build/bench/scheduler.json)
	PYTHONPATH=. $(BIN)/python benchmarks/scheduler.py

bench-retention: $(VENV)/.installed ## measure the retention of KV blocks between the turns of sessions, in virtual time (build/bench/session_retention.json)
	PYTHONPATH=. $(BIN)/python benchmarks/session_retention.py

bench-explain: $(VENV)/.installed ## measure the cost of request explanations, and check that their parts add up (build/bench/explain.json)
	OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=500 PYTHONPATH=. $(BIN)/python benchmarks/explain.py

bench-engine: $(VENV)/.installed $(PEERS)/vllm/.installed ## compare the engine with vLLM and transformers on this CPU (build/bench/engine.json)
	PYTHONPATH=. $(BIN)/python benchmarks/engine.py $(ARGS)

bench-online: $(VENV)/.installed $(PEERS)/vllm/.everlift $(if $(findstring --engine vllm,$(ARGS)),,$(PEERS)/ray-llm/.installed) ## compare the product under load with vllm serve and Ray Serve LLM; ARGS="--engine vllm": with vLLM as the engine (build/bench/online*.json)
	PYTHONPATH=. $(BIN)/python benchmarks/online/online_bench.py $(ARGS)

bench-generator: $(VENV)/.installed $(PEERS)/guidellm/.installed ## compare the load generator with guidellm, on an endpoint with known latencies (build/bench/load_generator.json)
	PYTHONPATH=. $(BIN)/python benchmarks/load_generator.py

bench-collectives: $(VENV)/.installed ## compare all-reduce on CPUs: shared memory and gloo (build/bench/collectives.json)
	PYTHONPATH=. $(BIN)/python benchmarks/collectives.py

bench-gpu: $(VENV)/.installed ## compare the engine on one GPU with the GPU's limits and with transformers; 10 minutes; ARGS="--shape gpt-oss-20b" (build/bench/gpu.json)
	PYTHONPATH=. $(BIN)/python benchmarks/gpu/gpu.py $(ARGS)

bench-gpu-product: $(VENV)/.installed ## run the product on one GPU without Ray under faults, and check that texts stay identical (build/bench/gpu_product.json)
	PYTHONPATH=. $(BIN)/python benchmarks/gpu/gpu_product.py

check: lint types imports proto-check chart-check texts ## check style, types, import rules, wire contract, chart, texts and documents

lint: $(VENV)/.installed
	$(BIN)/ruff check --no-cache
	$(BIN)/ruff format --check

types: $(VENV)/.installed
	$(BIN)/mypy

imports: $(VENV)/.installed
	$(BIN)/lint-imports

proto: $(PROTO_VENV)/.installed ## generate the stubs beside every .proto file
	@tools/generate_stubs.sh $(PROTO_BIN) proto proto $(PROTOS)
	@tools/generate_stubs.sh $(PROTO_BIN) . . $(SERVER_PROTOS)

proto-release: $(PROTO_VENV)/.installed ## write the wire contract of this release to proto/contract.binpb
	$(PROTO_BIN)/buf build proto -o $(CONTRACT) --exclude-source-info

proto-check: $(PROTO_VENV)/.installed
	$(PROTO_BIN)/buf lint
	$(PROTO_BIN)/buf breaking proto --against $(CONTRACT)
	@rm -rf build/stubs && mkdir -p build/stubs/proto
	@tools/generate_stubs.sh $(PROTO_BIN) proto build/stubs/proto $(PROTOS)
	@tools/generate_stubs.sh $(PROTO_BIN) . build/stubs $(SERVER_PROTOS)
	@cd build/stubs && for stub in $$(find . -type f); do \
	  cmp -s $$stub ../../$$stub || { echo "$$stub is not current: run make proto"; exit 1; }; done
	@echo "stubs are current"

chart: $(VENV)/.installed ## generate the Helm chart's schema, table of values, and defaults
	$(BIN)/python tools/generate_chart.py

chart-check: $(VENV)/.installed
	$(BIN)/python tools/generate_chart.py --check

texts: $(VENV)/.installed
	$(BIN)/pytest -q -m "not long" -n 2 --dist=loadfile $(PROJECT)

lock: $(VENV)/.installed ## write the versions that .venv contains to constraints.txt
	@{ echo "# Every package of .venv at the version that the tests ran with; made by make lock."; \
	  echo "# But triton: torch's CUDA builds say which one they need."; \
	  $(BIN)/pip freeze --exclude-editable | grep -vE '^(torch|triton)=='; echo torch==$(TORCH); } > constraints.txt

clean: ## remove the environments and all build outputs
	rm -rf $(VENV) $(PROTO_VENV) $(CLIENTS_VENV) build
