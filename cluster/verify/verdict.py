"""Verdict on a stream that was disturbed. Pure."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """Fate of a disturbed stream, in order of severity."""

    #: the client received the undisturbed output
    EXACT = "exact"
    #: the stream ended early, with or without an error
    LOST = "lost"
    #: a part of the output came twice
    REPEATED = "repeated"
    #: after some output, the output began again
    RESTARTED = "restarted"
    #: the output differs from the undisturbed one
    CHANGED = "changed"


def verdict(expected: str, received: str) -> Verdict:
    """Compare the text that a client received with that of an undisturbed stream."""
    if received == expected:
        return Verdict.EXACT
    if expected.startswith(received):
        return Verdict.LOST
    common = _common_prefix(expected, received)
    best = Verdict.CHANGED
    for cut in range(common, 0, -1):
        rest = received[cut:]
        if expected.startswith(rest):
            return Verdict.RESTARTED
        # The stream went back to an earlier place, and continued from there.
        place = expected.find(rest, 1)
        if 0 < place < cut:
            best = Verdict.REPEATED
    return best


def _common_prefix(one: str, other: str) -> int:
    """Return the number of leading characters that both texts share."""
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)
