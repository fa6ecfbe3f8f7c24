"""Limits of an engine, resolved once at start from the model and the settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from everlift.hashes import BLOCK_SIZE
from worker.config import Scheduling, Speculation, WorkerConfig
from worker.device.device_kind import DeviceKind


def blocks_for(num_tokens: int) -> int:
    """Return the number of KV blocks that ``num_tokens`` tokens need."""
    return -(-num_tokens // BLOCK_SIZE)


class Device(Protocol):
    """Part of the interface ``worker.engine.plan.Runner`` that ``Limits.of`` reads."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_host_blocks(self) -> int: ...

    @property
    def host_load_s(self) -> float: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def device_kind(self) -> DeviceKind: ...

    @property
    def adapters(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine.

    ``num_blocks`` is the number of blocks of the KV cache. ``num_host_blocks`` is the number of
    blocks that fit into host memory for swapping; loading one of them takes ``host_load_s``
    seconds. ``max_model_len`` limits the tokens of one sequence, prompt and output together;
    ``max_num_seqs`` and ``max_num_batched_tokens`` limit the sequences and the tokens of one step.
    ``watermark_blocks`` is the number of blocks that must stay free when a sequence is admitted
    while others are in the batch. All sessions together retain at most ``max_retained_blocks`` free
    blocks, and each session for ``session_retention_s`` seconds. ``adapters`` maps the name of each
    LoRA adapter that the engine was started with to the adapter's digest. An engine with adapter
    slots loads adapters while it runs, and has at most ``num_adapter_slots`` of them in memory at
    once. An engine without slots loads none while it runs, and serves only those in ``adapters``. A
    request may have at most ``max_images`` images.
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
    host_load_s: float = 0.0
    session_retention_s: float = 0.0
    max_retained_blocks: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)
    num_adapter_slots: int = 0
    max_images: int = 0

    @property
    def can_launch_ahead(self) -> bool:
        """Return whether a step can be planned before the previous step's tokens are known.

        True unless draft tokens are enabled.
        """
        return not self.speculation.num_draft_tokens

    @classmethod
    def of(cls, config: WorkerConfig, runner: Device) -> Self:
        """Return the limits that follow from the settings and the runner's device.

        ``max_model_len`` is the smallest of the configured value (if any), the model's context
        length, and the number of tokens that the KV blocks hold. Routers receive that value.
        """
        requested = config.max_model_len or runner.max_model_len
        return cls(
            num_blocks=runner.num_blocks,
            vocab_size=runner.vocab_size,
            max_model_len=min(requested, runner.max_model_len, runner.num_blocks * BLOCK_SIZE),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.batched_tokens(runner.device_kind),
            watermark_blocks=max(1, int(config.watermark * runner.num_blocks)),
            num_host_blocks=runner.num_host_blocks,
            speculation=config.speculation,
            scheduling=config.scheduling,
            host_load_s=runner.host_load_s,
            session_retention_s=config.session_retention_s,
            max_retained_blocks=int(config.session_share * runner.num_blocks),
            adapters=runner.adapters,
            num_adapter_slots=config.num_adapter_slots,
        )


#: Number of successful steps after which even the smallest budget has grown to the full one.
_STEPS_TO_RECOVER = 512


class TokenBudget:
    """Token budget of the next step: ``most`` tokens, or fewer after a step ran out of memory.

    After such a step the budget is half of that step's tokens. It grows again with each step that
    succeeds.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = most

    @property
    def tokens(self) -> int:
        """Token budget of the next step, at least 1."""
        return self._tokens

    def shrink(self, num_tokens: int) -> None:
        """Set the budget to half of ``num_tokens``, the tokens of a step that ran out of memory."""
        self._tokens = max(1, num_tokens // 2)

    def recover(self, steps: int = 1) -> None:
        """Grow the budget, up to its maximum, because ``steps`` steps succeeded."""
        more = steps * (1 + self._most // _STEPS_TO_RECOVER)
        self._tokens = min(self._most, self._tokens + more)
