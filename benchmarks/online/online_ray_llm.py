"""Server of Ray Serve LLM on vLLM's CPU build, which runs until SIGINT.

    python online_ray_llm.py --model DIRECTORY --port 8000 --max-model-len 1024 --dtype bfloat16

The interpreter is that of the peer's environment. Environment variables of Ray and vLLM select the
mode.
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

#: Environment variables that are passed to replicas, beside those of vLLM.
_PASSED_ON = ("HF_HUB_OFFLINE",)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--preload", default="", help="LD_PRELOAD of the replicas only")
    options = parser.parse_args()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.startswith("VLLM_")
    }
    environment["LD_PRELOAD"] = options.preload
    # Intel's OpenMP binds a process that loads it to the first core. Ray would inherit that.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    config = LLMConfig(
        model_loading_config={
            "model_id": options.model.name,
            "model_source": str(options.model.resolve()),
        },
        deployment_config={"num_replicas": 1},
        # Ray Serve LLM requests a GPU unless the bundle has only a CPU.
        placement_group_config={"bundles": [{"CPU": 1}]},
        engine_kwargs={
            "dtype": options.dtype,
            "max_model_len": options.max_model_len,
            "enable_prefix_caching": False,
            "distributed_executor_backend": "mp",
        },
        runtime_env={"env_vars": environment},
    )
    # The replica, the ingress and the proxies reserve a core each.
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
