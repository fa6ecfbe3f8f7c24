"""What an engine has done since it started, in sums. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.v1 import inference_pb2


@dataclass(slots=True)
class Counters:
    """The fields are those of the message EngineCounters, where they are explained. The scheduler
    counts on; what it tells are copies."""

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
