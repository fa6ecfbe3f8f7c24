"""What bounds an engine: the model's limits and the operator's, resolved once at start. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, Self

from everlift.blockhash import BLOCK_SIZE
from worker.config import Scheduling, Speculation, WorkerConfig
from worker.device.device_kind import DeviceKind


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold the KV of so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class Device(Protocol):
    """What bounds whoever computes, as ``worker.engine.plan.Runner`` has it."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_host_blocks(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def device_kind(self) -> DeviceKind: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_model_len`` counts prompt and output; ``watermark_blocks`` stay free when a sequence is
    admitted beside others; ``num_host_blocks`` are places for blocks in the host's memory."""

    num_blocks: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark_blocks: int
    num_host_blocks: int
    speculation: Speculation
    scheduling: Scheduling = field(default_factory=Scheduling)

    @property
    def plans_ahead(self) -> bool:
        """Whether a step can be planned before what the one before it drew is known. Drafts follow
        from what was drawn."""
        return not self.speculation.num_draft_tokens

    @classmethod
    def of(cls, config: WorkerConfig, runner: Device) -> Self:
        """A pool smaller than the model's context makes the context smaller: routers are told so,
        and no sequence outgrows the pool."""
        wanted = config.max_model_len or runner.max_model_len
        return cls(
            num_blocks=runner.num_blocks,
            vocab_size=runner.vocab_size,
            max_model_len=min(wanted, runner.max_model_len, runner.num_blocks * BLOCK_SIZE),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.batched_tokens(runner.device_kind),
            watermark_blocks=max(1, int(config.watermark * runner.num_blocks)),
            num_host_blocks=runner.num_host_blocks,
            speculation=config.speculation,
            scheduling=config.scheduling,
        )
