"""Worker of vLLM on a GPU, which ends with the rank that started it."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from worker.vllm_engine.child import end_with_rank


class EndingGPUWorker(Worker):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        end_with_rank()
        super().__init__(*arguments, **named)
