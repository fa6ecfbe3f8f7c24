"""What a step made of a sequence. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from everlift.v1 import session_pb2


class SequenceKey(NamedTuple):
    """Names a sequence within a worker."""

    epoch: int
    choice: int


class Stop(Enum):
    #: a stop token, which is the last token
    EOS = session_pb2.STOP_CAUSE_EOS
    #: max_tokens, or the context is full
    LENGTH = session_pb2.STOP_CAUSE_LENGTH
    #: given back unfinished
    RETURNED = session_pb2.STOP_CAUSE_RETURNED
    #: never started
    REFUSED = session_pb2.STOP_CAUSE_REFUSED
    #: the engine could not go on with it
    FAILED = session_pb2.STOP_CAUSE_FAILED


@dataclass(frozen=True, slots=True)
class Outcome:
    """New tokens, the first of them at output ``offset``, and with ``stop`` the sequence's end."""

    key: SequenceKey
    offset: int
    tokens: tuple[int, ...] = ()
    stop: Stop | None = None
    error: str = ""
