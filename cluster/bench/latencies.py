"""How long requests took, in seconds, from a moment of theirs on. Pure.

    ttft   to the first piece of output
    itl    between two pieces, each gap by itself; a piece may hold several tokens
    tpot   between two tokens: from the first piece to the last by the tokens after the first
    e2el   to the last piece
    norm   e2el by output tokens (normalised latency, as in Orca and vLLM's paper)

Whether time counts from when a request was due or from when it was sent changes ttft, e2el and norm
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from cluster.bench.outcome import Outcome

Begin = Callable[[Outcome], float]


def due(outcome: Outcome) -> float:
    return outcome.due


def sent(outcome: Outcome) -> float:
    return outcome.sent


def ttft(outcome: Outcome, begin: Begin) -> float:
    return outcome.pieces[0] - begin(outcome)


def e2el(outcome: Outcome, begin: Begin) -> float:
    return outcome.pieces[-1] - begin(outcome)


def tpot(outcome: Outcome) -> float:
    """0 where there are not two tokens: such a request misses no target of it."""
    if outcome.output_tokens < 2:
        return 0.0
    return (outcome.pieces[-1] - outcome.pieces[0]) / (outcome.output_tokens - 1)


def itls(outcome: Outcome) -> list[float]:
    return [after - before for before, after in pairwise(outcome.pieces)]


def by_name(complete: Sequence[Outcome], begin: Begin) -> Mapping[str, list[float]]:
    """Of answers that are whole."""
    return {
        "ttft": [ttft(each, begin) for each in complete],
        "tpot": [tpot(each) for each in complete if each.output_tokens > 1],
        "itl": [gap for each in complete for gap in itls(each)],
        "e2el": [e2el(each, begin) for each in complete],
        "norm": [e2el(each, begin) / each.output_tokens for each in complete],
    }
