"""Load and counters of an engine, as routers receive them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine.

    ``committed_tokens`` are all known tokens (prompt and output so far) of running and waiting
    sequences. ``waiting_cached_tokens`` are the known tokens of waiting sequences that are expected
    to be prefix-cache hits. ``pending_prefill_tokens`` are the known tokens that must still be
    prefilled: they are not computed yet, they are not expected hits, and they are not the one token
    that each decoding sequence computes next. ``long_prefill_tokens`` are the pending tokens of
    prompts in the batch that need more than one step; 0 if the policy does not let shorter prompts
    overtake them. ``blocks_cached`` are free blocks in the prefix cache, of which sessions retain
    ``blocks_retained``.

    The other fields from ``step`` on are totals since the engine started. ``computed_tokens``
    includes draft tokens. ``kv_tokens`` is the number of tokens whose KV was read, and
    ``num_pairs`` the number of pairs of a computed token and a token that it attended to.
    ``released_blocks`` is the number of blocks that became free when sequences ended or were
    aborted.
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
    blocks_retained: int = 0
    kv_tokens: int = 0
    num_pairs: int = 0
    waiting_cached_tokens: int = 0
    long_prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Occupant:
    """Sequence of request ``request_id`` in batch slot ``slot``.

    If ``prefilling``, it has several tokens left to compute; otherwise it decodes.
    """

    slot: int
    request_id: str
    prefilling: bool = False


@dataclass(slots=True)
class Counters:
    """Totals since the engine started, except ``unfilled_tokens``, which is a current value.

    The message EngineCounters documents the fields.
    """

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
