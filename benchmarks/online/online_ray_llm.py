"""Ray Serve LLM on vLLM's CPU build, until SIGINT; run by the peer's own interpreter.

    python online_ray_llm.py --model DIRECTORY --port 8000 --max-model-len 1024 --dtype bfloat16

Ray's and vLLM's environment variables say in which mode.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

#: What a replica needs, too, beside vLLM's own variables.
_HANDED_ON = ("HF_HUB_OFFLINE",)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--preload", default="", help="libraries, of replicas alone")
    options = parser.parse_args()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _HANDED_ON or name.startswith("VLLM_")
    }
    environment["LD_PRELOAD"] = options.preload
    # Intel's OpenMP binds who loads it to the first core; all of Ray would have that from here.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    config = LLMConfig(
        model_loading_config={
            "model_id": options.model.name,
            "model_source": str(options.model.resolve()),
        },
        deployment_config={"num_replicas": 1},
        # A bundle with nothing but a core is how it knows that there is no GPU.
        placement_group_config={"bundles": [{"CPU": 1}]},
        engine_kwargs={
            "dtype": options.dtype,
            "max_model_len": options.max_model_len,
            "enable_prefix_caching": False,
            "distributed_executor_backend": "mp",
        },
        runtime_env={"env_vars": environment},
    )
    # Replica, ingress and whatever routes between them want a core each.
    with tempfile.TemporaryDirectory(prefix="ray-llm-") as directory:
        ray.init(address="local", num_cpus=8, include_dashboard=False, _temp_dir=directory)
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        serve.run(build_openai_app({"llm_configs": [config]}))
        with suppress(KeyboardInterrupt):
            signal.pause()
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
