"""Worker of vLLM on a CPU, whose sampling depends only on seed and position.

vLLM draws the noise of a seeded request from a generator with a state, which a continuation would
have to replay. Here the generator is set anew for each token.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401
from vllm.v1.worker import cpu_worker, gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from worker.vllm_engine.child import end_with_rank, unlink_segments
from worker.vllm_engine.scheduling import known_tokens

#: Odd constant by which seeds are spread over the generator's seeds.
_SEED_FACTOR = 0x9E3779B97F4A7C15
_SEED_BITS = 63


class _PositionGenerator(torch.Generator):
    """Generator that ignores changes of its offset.

    vLLM rewinds the offset after a chunk of a prefill, which torch's CPU generator does not
    support.
    """

    def get_offset(self) -> int:
        return 4

    def set_offset(self, offset: int) -> None:
        pass


class _ContinuedState(CachedRequestState):
    """State of a request in vLLM's runner, including the output that the request was queued with.

    The generator of a seeded request is replaced by a _PositionGenerator.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.output_token_ids.extend(known_tokens(self.sampling_params))
        if self.generator is not None:
            self.generator = _PositionGenerator(device=self.generator.device)


class _ContinuingRunner(CPUModelRunner):
    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        for row, generator in self.input_batch.generators.items():
            state = self.requests[self.input_batch.req_ids[row]]
            generator.manual_seed(_seed(state))
        return super()._sample(logits, spec_decode_metadata)


def _seed(state: CachedRequestState) -> int:
    """Return the seed of the next token of a request."""
    mixed = state.sampling_params.seed * _SEED_FACTOR + len(state.output_token_ids)
    return mixed % (1 << _SEED_BITS)


class ContinuingCPUWorker(cpu_worker.CPUWorker):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        end_with_rank()
        super().__init__(*arguments, **named)

    def init_device(self) -> None:
        gpu_model_runner.CachedRequestState = _ContinuedState
        cpu_worker.CPUModelRunner = _ContinuingRunner
        super().init_device()
        unlink_segments()
