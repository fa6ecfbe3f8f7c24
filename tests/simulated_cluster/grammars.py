"""Grammars of a simulated worker: one of several texts, written byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everlift.errors import EverliftError, InvalidRequest
from everlift.sampling import Grammar, GrammarKind
from worker.serving.sessions import Compiled


@dataclass(frozen=True, slots=True)
class Texts:
    """A FakeGrammar for byte tokens. What ends a text is not a byte of any."""

    texts: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]

    def allowed(self, output: Sequence[int]) -> Sequence[int]:
        written = bytes([*output])
        following = [text[len(written) :] for text in self.texts if text.startswith(written)]
        return sorted({rest[0] if rest else self.eos_token_ids[0] for rest in following})


class SimGrammars:
    """Compiles choices at once. ``eos_token_id`` is the model's."""

    def __init__(self, eos_token_id: int) -> None:
        self._eos_token_id = eos_token_id

    def compile(self, grammar: Grammar, done: Callable[[Compiled | EverliftError], None]) -> None:
        if grammar.kind is not GrammarKind.CHOICE:
            done(InvalidRequest("the simulated model follows choices alone"))
        else:
            texts = tuple(text.encode() for text in grammar.texts)
            done(Texts(texts, (self._eos_token_id,)))
