"""Grammar compiler of a worker with the fake model, which supports no grammar. Pure."""

from __future__ import annotations

from collections.abc import Callable

from everlift.errors import InvalidRequest
from everlift.sampling import Grammar


class NoGrammars:
    """Grammar compiler that refuses every grammar with InvalidRequest."""

    def compile(self, grammar: Grammar, done: Callable[[InvalidRequest], None]) -> None:
        done(InvalidRequest("the fake model supports no grammar"))

    def close(self) -> None:
        """Do nothing."""
