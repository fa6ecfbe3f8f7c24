"""Findings of ``everlift doctor``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    #: works, but not as well as it could
    WARNING = "warning"
    #: does not work
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check of ``subject``.

    ``says`` describes the result for the user. ``mend`` is advice on how to fix the problem; it is
    empty if there is no problem.
    """

    subject: str
    level: Level
    says: str
    mend: str = ""


def fine(subject: str, says: str) -> Finding:
    return Finding(subject, Level.OK, says)


def doubtful(subject: str, says: str, mend: str) -> Finding:
    return Finding(subject, Level.WARNING, says, mend)


def broken(subject: str, says: str, mend: str) -> Finding:
    return Finding(subject, Level.ERROR, says, mend)
