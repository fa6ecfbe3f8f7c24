"""Prompts without a meaning, of the lengths that a workload says. Pure.

The names of an arrival's prefix stand for its content: two prompts that have the first n names in
common begin with the same n parts, so that caches of prefixes find what they would have found. All
else is drawn afresh for each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from cluster.simulator.workloads.arrival import Arrival

#: Each is one token behind a space in the vocabularies of most models.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law"
).split()


class Prompts(Protocol):
    def prompt(self, arrival: Arrival, number: int) -> tuple[str | tuple[int, ...], int]:
        """That of the load's ``number``-th request, and how many tokens it has as far as is
        known."""
        ...


class TokenPrompts:
    """Token ids from 1 on: 0 is often something else than text."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._ids = range(1, vocab_size)
        self._seed = seed

    def prompt(self, arrival: Arrival, number: int) -> tuple[tuple[int, ...], int]:
        ids = tuple(_drawn(self._ids, arrival, f"{self._seed}/{number}"))
        return ids, len(ids)


class WordPrompts:
    """Words, one for each token. With a ``tokenizer`` (of the tokenizers library) the text is cut
    to as many tokens as are wanted, and is counted by it."""

    def __init__(self, tokenizer: Any | None, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed

    def prompt(self, arrival: Arrival, number: int) -> tuple[str, int]:
        text = " ".join(_drawn(_WORDS, arrival, f"{self._seed}/{number}"))
        return (
            self._cut(text, arrival.prompt_tokens)
            if self._tokenizer
            else (
                text,
                arrival.prompt_tokens,
            )
        )

    def _cut(self, text: str, tokens: int) -> tuple[str, int]:
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        cut = self._tokenizer.decode(ids[:tokens])
        return cut, len(self._tokenizer.encode(cut, add_special_tokens=False).ids)


def _drawn(units: Sequence[Any], arrival: Arrival, name: str) -> list[Any]:
    """``arrival.prompt_tokens`` of ``units``."""
    drawn: list[Any] = []
    for part in arrival.prefix:
        drawn += Random(f"part/{part}").choices(units, k=arrival.prefix_part_tokens)
    del drawn[arrival.prompt_tokens :]
    return drawn + Random(name).choices(units, k=arrival.prompt_tokens - len(drawn))
