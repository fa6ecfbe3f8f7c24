"""Suggestions for misspelt names. Pure.

Names that are merely similar may have opposite meanings (allowed_token_ids and stop_token_ids,
min_tokens and max_tokens). A name is therefore suggested only for a single typing error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Length of the longest name that is compared.
_MAX_NAME = 64
#: Minimum lengths of names in which an added letter, or a changed letter, counts as a typing error.
#: Shorter names that differ in one letter are different names (top_k and top_p).
_MIN_ADDED = 4
_MIN_CHANGED = 6
_SEPARATORS = re.compile(r"[-_. ]")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" for a known name that ``name`` misspells, else ""."""
    if len(name) > _MAX_NAME:
        return ""
    near = next((each for each in known if _is_typo(name, each)), None)
    return f"; did you mean {near!r}?" if near is not None else ""


def _is_typo(name: str, known: str) -> bool:
    """Return whether ``name`` is ``known`` with at most one typing error.

    Case and separators are ignored. A typing error is one letter that is missing, added, changed,
    or swapped with the next letter. An error counts only if the shorter name has at least
    ``_MIN_ADDED`` letters, or ``_MIN_CHANGED`` for a changed letter.
    """
    short, long = sorted((_letters(name), _letters(known)), key=len)
    if short == long:
        return True
    if len(short) < _MIN_ADDED or len(long) - len(short) > 1:
        return False
    at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    is_swapped = short[at : at + 2] == long[at : at + 2][::-1]
    is_changed = len(short) >= _MIN_CHANGED and short[at + 1 :] == long[at + 1 :]
    return is_changed or (is_swapped and short[at + 2 :] == long[at + 2 :])


def _letters(name: str) -> str:
    return _SEPARATORS.sub("", name).lower()
