"""Load and counters of an engine, as routers receive them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine.

    ``pending_prefill_tokens`` are known and not computed, excluding the one token of each decoding
    sequence. ``committed_tokens`` are all known tokens. Both include waiting sequences.
    ``blocks_cached`` are free blocks in the prefix cache.

    The other fields from ``step`` on are totals since the engine started. ``computed_tokens``
    includes drafts, ``kv_tokens`` and ``num_pairs`` are those of computed rows (``plan.Rows``), and
    ``released_blocks`` became free when sequences ended or were aborted.
    """

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
    """Sequence of a request in batch slot ``slot``; it decodes unless it is ``prefilling``."""

    slot: int
    request_id: str
    prefilling: bool = False


@dataclass(slots=True)
class Counters:
    """Counters with the fields of the message EngineCounters, which documents them."""

    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    slot_steps: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    unfilled_tokens: int = 0

    def to_proto(self) -> inference_pb2.EngineCounters:
        sums = {name: getattr(self, name) for name in self.__slots__}
        return inference_pb2.EngineCounters(**sums)
