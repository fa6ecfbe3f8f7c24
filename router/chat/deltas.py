"""Deltas of an output's text. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: Mistral's templates take ids of nine letters and digits alone, and all others take these too.
_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Start of a tool call; ``index`` counts an output's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Next part of the JSON arguments of call ``index``."""

    index: int
    text: str


Delta = Content | CallBegins | Arguments


def call_id(request_id: str, choice: int, index: int) -> str:
    """Return the same for the same output: who reads a stream again must see the same ids."""
    digest = blake2b(f"{request_id} {choice} {index}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return "".join(_DIGITS[number // 62**i % 62] for i in range(_ID_LENGTH))


class Deltas:
    """Gathers them; neighbours of one sort become one."""

    def __init__(self) -> None:
        #: of texts the pieces: a long output may come at once
        self._gathered: list[tuple[CallBegins | int | None, list[str]]] = []

    def content(self, text: str) -> None:
        self._append(None, text)

    def arguments(self, index: int, text: str) -> None:
        self._append(index, text)

    def call(self, begins: CallBegins) -> None:
        self._gathered.append((begins, []))

    def drain(self) -> list[Delta]:
        """Return the deltas since the last call."""
        gathered, self._gathered = self._gathered, []
        return [_delta(kind, "".join(texts)) for kind, texts in gathered]

    def _append(self, kind: int | None, text: str) -> None:
        if not text:
            return
        if self._gathered and self._gathered[-1][0] == kind:
            self._gathered[-1][1].append(text)
        else:
            self._gathered.append((kind, [text]))


def _delta(kind: CallBegins | int | None, text: str) -> Delta:
    if isinstance(kind, CallBegins):
        return kind
    return Content(text) if kind is None else Arguments(kind, text)
