"""Limits of an engine, from the model and the settings, resolved once at start. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, Self

from everlift.hashes import BLOCK_SIZE
from worker.config import Scheduling, Speculation, WorkerConfig
from worker.device.device_kind import DeviceKind


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks for the KV of so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class Device(Protocol):
    """Limits of a device, as ``worker.engine.plan.Runner`` has them."""

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
    """Limits of an engine; ``max_model_len`` counts prompt and output.

    ``watermark_blocks`` stay free when a sequence is admitted beside others. ``num_host_blocks`` is
    the capacity of the host's memory for blocks.
    """

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
        """Return whether a step can be planned before the last one's tokens are known."""
        return not self.speculation.num_draft_tokens

    @classmethod
    def of(cls, config: WorkerConfig, runner: Device) -> Self:
        """Resolve the limits.

        A pool smaller than the model's context makes the context smaller: routers are told so, and
        no sequence outgrows the pool.
        """
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


#: After so many steps that went well, all that was taken away is given back.
_STEPS_TO_RECOVER = 512


class TokenBudget:
    """Token budget of a step: as configured, and less after a step ran out of memory.

    Then it is half of that step's tokens, and grows slowly.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = most

    @property
    def tokens(self) -> int:
        """Tokens of the next step, at least 1."""
        return self._tokens

    def shrink(self, num_tokens: int) -> None:
        """Shrink after a step of so many tokens was too large."""
        self._tokens = max(1, num_tokens // 2)

    def recover(self, steps: int = 1) -> None:
        """Grow after a step that succeeded."""
        more = steps * (1 + self._most // _STEPS_TO_RECOVER)
        self._tokens = min(self._most, self._tokens + more)
