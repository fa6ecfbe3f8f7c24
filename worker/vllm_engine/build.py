"""Construction of the vLLM engine, in the process that runs it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from everlift.sampling import MAX_BANNED_SEQUENCE_TOKENS, MAX_BANNED_SEQUENCES
from worker.config import WorkerConfig
from worker.engine.step_times import STOPPED, Stopwatch
from worker.vllm_engine.child import unlink_segments
from worker.vllm_engine.engine import VllmEngine
from worker.vllm_engine.version import check_version

#: Variables that vLLM reads when it is imported.
_ENVIRONMENT = {
    # The core runs in this process: its loop is the worker's.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Processes of tensor parallelism start afresh, because this process has threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Standard output belongs to the worker's reports; messages go to the root logger.
    "VLLM_CONFIGURE_LOGGING": "0",
    # The model's files are there already, and nothing is reported to others.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The model runner for GPUs fails if the banned sequences of a request exceed these.
    "VLLM_MAX_NUM_BAD_WORDS": str(MAX_BANNED_SEQUENCES),
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": str(MAX_BANNED_SEQUENCES * MAX_BANNED_SEQUENCE_TOKENS),
}


def build_engine(
    config: WorkerConfig,
    within: Callable[[int, int], AbstractContextManager[object]],
    stopwatch: Stopwatch = STOPPED,
    on_failure: Callable[[str], None] = lambda cause: None,
) -> VllmEngine:
    """Load vLLM and the model, and return the engine.

    Each step runs in the context manager that ``within`` returns, as in ``VllmEngine``;
    ``stopwatch`` times the parts of steps. ``on_failure`` is called with the cause, in another
    thread, if a process of the engine ends, so that no further step can run.

    Raises VllmMissing if this interpreter lacks the supported version of vLLM. Raises
    ModelUnavailable if files of the model or of adapters are missing, or if the model is a GGUF
    file. Raises ValueError if adapters are invalid, or if vLLM chooses its model runner V1 on a
    GPU, which ignores the output that a continued sequence has. Errors of vLLM are raised too.
    """
    check_version()
    os.environ.update(_ENVIRONMENT)
    # OMP_NUM_THREADS holds, unless the cluster has bound the threads to cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Imported here because only this engine needs vLLM.
    from worker.vllm_engine.vllm_core import VllmCore

    core = VllmCore(config, on_failure)
    unlink_segments()
    return VllmEngine(core, core.limits, within, stopwatch, time.sleep)
