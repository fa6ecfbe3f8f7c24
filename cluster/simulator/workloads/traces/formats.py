"""What the lines of a trace say, by its format.

    azure      TIMESTAMP,ContextTokens,GeneratedTokens
    burstgpt   Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    mooncake   {"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]}

Azure's times are dates, BurstGPT's seconds, Mooncake's milliseconds. No format has what a client
set as ``max_tokens``: it is taken to be 4096, or the output's length where that is longer. A line
of BurstGPT without a prompt or an output is a request that had failed, and is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cluster.simulator.workloads.arrival import Arrival
from cluster.simulator.workloads.traces.row import Row

_MAX_TOKENS = 4096
_MOONCAKE_PART_TOKENS = 512


class Format(Protocol):
    def __call__(self, row: Row) -> Arrival | None:
        """``at`` is counted from the format's own zero. Raises WorkloadFailed."""
        ...


def azure(row: Row) -> Arrival:
    output_tokens = row.count("GeneratedTokens", least=1)
    return Arrival(
        row.moment("TIMESTAMP"),
        row.count("ContextTokens", least=1),
        output_tokens,
        max(_MAX_TOKENS, output_tokens),
    )


def burstgpt(row: Row) -> Arrival | None:
    prompt_tokens = row.count("Request tokens", least=0)
    output_tokens = row.count("Response tokens", least=0)
    if not prompt_tokens or not output_tokens:
        return None
    return Arrival(
        row.number("Timestamp"),
        prompt_tokens,
        output_tokens,
        max(_MAX_TOKENS, output_tokens),
        application=row.text("Log Type"),
    )


def mooncake(row: Row) -> Arrival:
    """The last of its blocks, which is not full, is nobody else's."""
    prompt_tokens = row.count("input_length", least=1)
    output_tokens = row.count("output_length", least=1)
    whole_parts = prompt_tokens // _MOONCAKE_PART_TOKENS
    return Arrival(
        row.number("timestamp") / 1000,
        prompt_tokens,
        output_tokens,
        max(_MAX_TOKENS, output_tokens),
        prefix=tuple(row.counts("hash_ids")[:whole_parts]),
        prefix_part_tokens=_MOONCAKE_PART_TOKENS,
    )


#: By the columns that a file of theirs begins with.
CSV: Mapping[frozenset[str], Format] = {
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}): azure,
    frozenset({"Timestamp", "Request tokens", "Response tokens", "Log Type"}): burstgpt,
}
