"""Interfaces of vLLM that the engine uses, each as the supported version has it.

Run in vLLM's own environment, by make test-vllm. Most of these interfaces are private. A test that
fails after a change of the version names the interface, and the module that uses it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("vllm")

from everlift.sampling import MAX_BANNED_SEQUENCE_TOKENS, MAX_BANNED_SEQUENCES
from tests.support.worker.engine_contract import without_watch
from worker.config import WorkerConfig
from worker.vllm_engine import version
from worker.vllm_engine.build import build_engine
from worker.vllm_engine.params import MAX_GPU_ALLOWED_TOKENS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "worker" / "vllm_engine"

#: Signatures without annotations, by module that uses them, and by name.
SIGNATURES: dict[str, dict[str, str]] = {
    "vllm_core": {
        "vllm.engine.arg_utils:EngineArgs.create_engine_config": (
            "(self, usage_context=None, headless=False)"
        ),
        "vllm.platforms:current_platform.is_cpu": "()",
        "vllm.platforms:current_platform.get_device_capability": "(device_id=0)",
        "vllm.platforms:current_platform.get_device_total_memory": "(device_id=0)",
        "vllm.config:ModelConfig.get_vocab_size": "(self)",
        "vllm.v1.engine.core:EngineCore.__init__": (
            "(self, vllm_config, executor_class, log_stats, executor_fail_callback=None, "
            "include_finished_set=False)"
        ),
        "vllm.v1.engine.core:EngineCore.preprocess_add_request": "(self, request)",
        "vllm.v1.engine.core:EngineCore.add_request": "(self, request, request_wave=0)",
        "vllm.v1.engine.core:EngineCore.abort_requests": "(self, request_ids)",
        "vllm.v1.engine.core:EngineCore.step": "(self)",
        "vllm.v1.engine.core:EngineCore.post_step": "(self, model_executed)",
        "vllm.v1.engine.core:EngineCore.shutdown": "(self)",
        "vllm.v1.engine.core:EngineCore.add_lora": "(self, lora_request)",
        "vllm.v1.engine.core:EngineCore.pin_lora": "(self, lora_id)",
        "vllm.v1.executor.abstract:Executor.get_class": "(vllm_config)",
        "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": "(self)",
    },
    "images": {
        "vllm.multimodal:MULTIMODAL_REGISTRY.create_processor": (
            "(model_config, *, tokenizer=None)"
        ),
        "vllm.multimodal.image:convert_image_mode": (
            "(image, to_mode, background_color=(255, 255, 255))"
        ),
        "vllm.multimodal.processing:BaseProcessingInfo.parse_mm_data": (
            "(self, mm_data, *, validate=True)"
        ),
        "vllm.multimodal.processing:BaseMultiModalProcessor.apply": "(self, inputs, timing_ctx)",
    },
    "executor": {
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.start_worker_monitor": (
            "(self, inline=False)"
        ),
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.shutdown": "(self)",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.register_failure_callback": (
            "(self, callback)"
        ),
    },
    "gpu_worker": {
        "vllm.v1.worker.gpu_worker:Worker.__init__": (
            "(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False)"
        ),
    },
    "params": {
        "vllm.v1.structured_output.backend_guidance:validate_guidance_grammar": (
            "(sampling_params, tokenizer=None)"
        ),
    },
    "scheduling": {
        "vllm.v1.core.sched.scheduler:Scheduler.add_request": "(self, request)",
        "vllm.v1.core.sched.scheduler:Scheduler.schedule": "(self, throttle_prefills=False)",
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": (
            "(self, request, timestamp, drop_stale_output=False)"
        ),
        "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request": "(self, request)",
        "vllm.v1.request:Request.append_output_token_ids": "(self, token_ids)",
        "vllm.v1.structured_output:StructuredOutputManager.accept_tokens": (
            "(self, request, new_token_ids)"
        ),
    },
    "cpu_worker": {
        "vllm.v1.worker.cpu_worker:CPUWorker.init_device": "(self)",
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._sample": (
            "(self, logits, spec_decode_metadata)"
        ),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState.__post_init__": "(self)",
    },
}

#: Fields of classes, which may have others, too. Positions count where a row is unpacked.
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm_core": {
        "vllm.config:KVEventsConfig": ("enable_kv_cache_events", "publisher"),
        "vllm.config:VllmConfig": ("model_config", "scheduler_config"),
        "vllm.distributed.kv_events:KVEventBatch": ("events",),
        "vllm.distributed.kv_events:BlockStored": (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "extra_keys",
        ),
        "vllm.distributed.kv_events:BlockRemoved": ("block_hashes",),
        "vllm.engine.arg_utils:EngineArgs": (
            "model",
            "dtype",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "tensor_parallel_size",
            "block_size",
            "enable_prefix_caching",
            "scheduling_policy",
            "kv_events_config",
            "skip_tokenizer_init",
            "generation_config",
            "scheduler_cls",
            "async_scheduling",
            "disable_log_stats",
            "num_gpu_blocks_override",
            "worker_cls",
            "enforce_eager",
            "kv_cache_memory_bytes",
            "gpu_memory_utilization",
            "enable_lora",
            "max_loras",
            "max_lora_rank",
            "distributed_executor_backend",
            "limit_mm_per_prompt",
            "mm_processor_cache_gb",
        ),
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
        ),
        "vllm.v1.core.sched.output:NewRequestData": ("req_id", "num_computed_tokens"),
        "vllm.v1.core.sched.output:CachedRequestData": (
            "req_ids",
            "resumed_req_ids",
            "num_computed_tokens",
        ),
        "vllm.v1.engine:EngineCoreRequest": (
            "request_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "pooling_params",
            "arrival_time",
            "lora_request",
            "cache_salt",
            "data_parallel_rank",
            "priority",
        ),
        "vllm.v1.engine:EngineCoreOutput": (
            "request_id",
            "new_token_ids",
            "new_logprobs",
            "new_prompt_logprobs_tensors",
            "finish_reason",
            "stop_reason",
        ),
        "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
        "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
    },
    "images": {
        "vllm.multimodal.processing.context:TimingContext": ("enabled",),
        "vllm.multimodal.processing.inputs:ProcessorInputs": (
            "prompt",
            "mm_data_items",
            "mm_uuid_items",
        ),
        "vllm.multimodal.inputs:MultiModalFeatureSpec": (
            "data",
            "modality",
            "identifier",
            "mm_position",
            "mm_hash",
        ),
        "vllm.inputs:MultiModalInput": ("prompt_token_ids", "mm_kwargs", "mm_placeholders"),
    },
    "params": {
        "vllm.sampling_params:SamplingParams": (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_tokens",
            "max_tokens",
            "stop_token_ids",
            "ignore_eos",
            "detokenize",
            "logprobs",
            "prompt_logprobs",
            "logit_bias",
            "allowed_token_ids",
            "structured_outputs",
            "extra_args",
            "_bad_words_token_ids",
        ),
        "vllm.sampling_params:StructuredOutputsParams": ("grammar", "_backend"),
    },
    "cpu_worker": {
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
            "sampling_params",
            "generator",
            "output_token_ids",
        ),
    },
}

#: First fields of named tuples that are unpacked by position.
ROWS = {
    "vllm.v1.outputs:LogprobsLists": ("logprob_token_ids", "logprobs", "sampled_token_ranks"),
    "vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks"),
}

#: Members of enumerations.
MEMBERS = {
    "vllm.v1.engine:FinishReason": ("STOP", "LENGTH", "ABORT", "ERROR", "REPETITION"),
    "vllm.v1.request:RequestStatus": ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING"),
}

#: Names that are replaced in a module of vLLM, which must look them up there.
REPLACED = {
    "vllm.v1.worker.gpu_model_runner:CachedRequestState": "GPUModelRunner",
    "vllm.v1.worker.cpu_worker:CPUModelRunner": "CPUWorker",
}

_LORA_RANKS = "vllm.config.lora:MaxLoRARanks"

#: Attributes of a started core, by module that uses them.
ATTRIBUTES = {
    "vllm_core": (
        "step_fn",
        "scheduler.kv_event_publisher.publish",
        "scheduler.kv_event_publisher.shutdown",
        "scheduler.kv_cache_manager.block_pool.num_gpu_blocks",
        "vllm_config.cache_config.block_size",
        "vllm_config.model_config.max_model_len",
        "vllm_config.model_config.is_multimodal_model",
        "vllm_config.use_v2_model_runner",
    ),
    "scheduling": (
        "scheduler.structured_output_manager",
        "scheduler.grammar_compile_error_reqs.add",
    ),
    "cpu_worker": (
        "model_executor.driver_worker.worker.model_runner.requests",
        "model_executor.driver_worker.worker.model_runner.input_batch.generators",
        "model_executor.driver_worker.worker.model_runner.input_batch.req_ids",
    ),
}


def found(name: str) -> Any:
    """Return the object of vLLM with a name like ``module:Class.method``."""
    module, _, path = name.partition(":")
    try:
        it = importlib.import_module(module)
        for part in path.split("."):
            it = getattr(it, part)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"vLLM has no {name}: {error}") from None
    return it


def signature(it: Any) -> str:
    """Return the signature without annotations."""
    whole = inspect.signature(it)
    bare = [each.replace(annotation=each.empty) for each in whole.parameters.values()]
    return str(whole.replace(parameters=bare, return_annotation=whole.empty))


def fields(cls: Any) -> set[str]:
    """Return the names of the annotated fields of a class and of its bases."""
    return {name for base in cls.__mro__ for name in vars(base).get("__annotations__", {})}


def flat(table: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, Any]]:
    return [(user, name, it) for user, names in table.items() for name, it in names.items()]


@pytest.mark.parametrize(("user", "name", "expected"), flat(SIGNATURES))
def test_signature_is_the_one_that_is_used(user: str, name: str, expected: str) -> None:
    actual = signature(found(name))
    assert actual == expected, f"{name}{actual}: worker/vllm_engine/{user}.py expects {expected}"


@pytest.mark.parametrize(("user", "name", "expected"), flat(FIELDS))
def test_class_has_the_fields_in_use(user: str, name: str, expected: tuple[str, ...]) -> None:
    missing = [field for field in expected if field not in fields(found(name))]
    assert not missing, f"{name} has no {missing}, which worker/vllm_engine/{user}.py uses"


@pytest.mark.parametrize("name", ROWS)
def test_tuple_begins_with_the_unpacked_fields(name: str) -> None:
    assert found(name)._fields[: len(ROWS[name])] == ROWS[name]


@pytest.mark.parametrize("name", MEMBERS)
def test_enumeration_has_the_members_in_use(name: str) -> None:
    missing = [member for member in MEMBERS[name] if member not in found(name).__members__]
    assert not missing, f"{name} has no {missing}"


def test_lora_ranks_are_listed_in_ascending_order() -> None:
    ranks = get_args(found(_LORA_RANKS))
    assert list(ranks) == sorted(ranks)


def test_finish_reasons_are_all_known() -> None:
    name = "vllm.v1.engine:FinishReason"
    assert set(found(name).__members__) == set(MEMBERS[name]), "map the new ones in vllm_core.py"


def test_validation_error_can_be_caught_as_an_exception() -> None:
    error = found("vllm.exceptions:VLLMValidationError")
    assert issubclass(error, Exception) and not issubclass(error, ValueError)


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_name_is_looked_up_in_its_module(name: str) -> None:
    module, _, replaced = name.partition(":")
    user = found(f"{module}:{REPLACED[name]}")
    sources = inspect.getsource(user)
    assert found(name).__name__ == replaced
    assert f"{replaced}(" in sources, f"{REPLACED[name]} makes no {replaced}"


@pytest.fixture(scope="module")
def core() -> Iterator[Any]:
    model = str(ROOT / "cluster" / "demo_model")
    engine = build_engine(
        WorkerConfig(model=model, engine="vllm", dtype="float32", num_blocks=64), without_watch
    )
    yield engine._core._core  # type: ignore[attr-defined]
    engine.close()


@pytest.mark.parametrize(
    ("user", "path"), [(user, path) for user, paths in ATTRIBUTES.items() for path in paths]
)
def test_started_core_has_the_attribute(core: Any, user: str, path: str) -> None:
    it, done = core, "EngineCore"
    for part in path.split("."):
        assert hasattr(it, part), f"{done} has no {part}, which worker/vllm_engine/{user}.py uses"
        it, done = getattr(it, part), f"{done}.{part}"


def test_gpu_runner_takes_as_many_tokens_as_assumed(core: Any) -> None:
    # The core's environment is set.
    envs = found("vllm:envs")
    assert envs.VLLM_MAX_NUM_BAD_WORDS >= MAX_BANNED_SEQUENCES
    most = MAX_BANNED_SEQUENCES * MAX_BANNED_SEQUENCE_TOKENS
    assert envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS >= most
    state = "vllm.v1.worker.gpu.sample.logit_bias"
    assert found(f"{state}:MAX_NUM_ALLOWED_TOKEN_IDS") == MAX_GPU_ALLOWED_TOKENS


def stated() -> set[str]:
    """Return the name of each module member that this file states."""
    names = [name for table in (SIGNATURES, FIELDS) for _, name, _ in flat(table)]
    names += [*ROWS, *MEMBERS, *REPLACED, "vllm.exceptions:VLLMValidationError", _LORA_RANKS]
    return set(names)


def imported() -> set[str]:
    """Return the names that the package imports from vLLM, as ``module:member``."""
    names = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                names |= {f"{node.module}:{alias.name}" for alias in node.names}
    return names


def test_imports_from_vllm_are_all_stated() -> None:
    names = stated()
    # A module that is imported is stated by its members.
    modules = {name.partition(":")[0] for name in names}
    unknown = [
        name
        for name in sorted(imported())
        if name.replace(":", ".") not in modules
        and not any(each == name or each.startswith(f"{name}.") for each in names)
    ]
    assert not unknown, f"state in this file what is used of {unknown}"


def test_version_is_the_supported_one() -> None:
    version.check_version()
