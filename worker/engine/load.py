"""The load of an engine, as routers are told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.counters import Counters


@dataclass(frozen=True, slots=True)
class Load:
    """``pending_prefill_tokens`` are known and not computed, without the one token of each sequence
    that decodes; ``committed_tokens`` are the known tokens of all sequences. What stands from
    ``step`` on counts from the engine's start: ``computed_tokens`` with drafts,
    ``kv_tokens`` and ``num_pairs`` as of the rows that were computed (``plan.Rows``),
    ``released_blocks`` that became free as sequences ended or left. ``blocks_cached`` are free and
    hold a known prefix."""

    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_total: int
    pending_prefill_tokens: int
    committed_tokens: int
    step: int
    output_tokens: int
    preemptions: int
    counters: Counters
    computed_tokens: int = 0
    released_blocks: int = 0
    blocks_cached: int = 0
    kv_tokens: int = 0
    num_pairs: int = 0


@dataclass(frozen=True, slots=True)
class Occupant:
    """Who has a batch slot. It decodes, or is still ``prefilling``."""

    slot: int
    request_id: str
    prefilling: bool = False
