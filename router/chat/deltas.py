"""Deltas: consecutive parts of an output's reasoning, content and tool calls. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: Length of call ids. Mistral's templates accept only ids of nine letters and digits, and all other
#: templates accept such ids too.
_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class Content:
    """Next part of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Next part of the reasoning, which precedes the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Start of a tool call; ``index`` is its position among the output's calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Next part of the JSON arguments of the output's call number ``index``."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegins | Arguments
#: Kind of a delta: the start of a call, the index of the call whose arguments it continues, or its
#: class.
_Kind = CallBegins | int | type[Content] | type[Reasoning]


def call_id(request_id: str, choice: int, index: int) -> str:
    """Return the id of tool call number ``index`` in the output of choice number ``choice``.

    The id depends only on these three parameters, because a client that reads a stream again must
    see the same ids.
    """
    digest = blake2b(f"{request_id} {choice} {index}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return "".join(_DIGITS[number // 62**i % 62] for i in range(_ID_LENGTH))


class Deltas:
    """Collector of deltas, which merges adjacent deltas of the same kind."""

    def __init__(self) -> None:
        #: kind and text of each delta. A text is a list of pieces, because a long output may arrive
        #: at once.
        self._gathered: list[tuple[_Kind, list[str]]] = []

    def content(self, text: str) -> None:
        self._append(Content, text)

    def reasoning(self, text: str) -> None:
        self._append(Reasoning, text)

    def arguments(self, index: int, text: str) -> None:
        self._append(index, text)

    def call(self, begins: CallBegins) -> None:
        self._gathered.append((begins, []))

    def drain(self) -> list[Delta]:
        """Return the deltas that were added since the last drain, and remove them."""
        gathered, self._gathered = self._gathered, []
        return [_delta(kind, "".join(texts)) for kind, texts in gathered]

    def _append(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if self._gathered and self._gathered[-1][0] == kind:
            self._gathered[-1][1].append(text)
        else:
            self._gathered.append((kind, [text]))


def _delta(kind: _Kind, text: str) -> Delta:
    if isinstance(kind, CallBegins):
        return kind
    return Arguments(kind, text) if isinstance(kind, int) else kind(text)
