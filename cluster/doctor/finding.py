"""Findings of the doctor. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    #: it works, worse than it could
    WARNING = "warning"
    #: it does not work
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check; ``mend`` is how to fix it."""

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
