"""Admissions and grammars for the sampler's tests. Needs no transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from everlift.errors import EngineFailed
from everlift.sampling import SamplingParams
from worker.engine.plan import Admission

#: Token ids that may follow an output.
Allowed = Callable[[Sequence[int]], Iterable[int]]


def admission(
    sampling: SamplingParams,
    prompt: Iterable[int] = (1,),
    output: Iterable[int] = (),
    slot: int = 0,
    choice: int = 0,
    stops: Iterable[int] = (),
    grammar: object | None = None,
) -> Admission:
    prompt = tuple(prompt)
    tokens = (*prompt, *output)
    return Admission(
        slot, tokens, len(prompt), sampling, frozenset(stops), choice=choice, grammar=grammar
    )


class FakeGrammar:
    """CompiledGrammar (worker.runner.token_mask) that permits ``allowed`` of the output so far."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        #: matchers that are still referenced
        self.matchers = WeakSet[FakeMatcher]()

    def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> FakeMatcher:
        matcher = FakeMatcher(self._allowed, [*output])
        self.matchers.add(matcher)
        return matcher


class FakeMatcher:
    def __init__(self, allowed: Allowed, output: list[int]) -> None:
        self._allowed = allowed
        self.output = output
        self.ready = True

    def is_ready(self) -> bool:
        return self.ready

    def mask(self, drafts: Sequence[int], into: Tensor, waiting_since: float) -> int:
        assert into.shape[0] == 1 + len(drafts) and into.dtype == torch.int32
        into.fill_(0x55555555)  # rows behind a forbidden draft are undefined
        for i in range(1 + len(drafts)):
            allowed = {*self._allowed([*self.output, *drafts[:i]])}
            into[i] = _words(allowed, into.shape[1])
            if i < len(drafts) and drafts[i] not in allowed:
                return i
        return len(drafts)

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in {*self._allowed(self.output)}:
                raise EngineFailed(f"{token} is not of the grammar")
            self.output.append(token)


def _words(tokens: Iterable[int], count: int) -> Tensor:
    words = [0] * count
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)
