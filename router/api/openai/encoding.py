"""Values as JSON, as clients get it, whole or in parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def around(value: object, name: str, held: object) -> tuple[str, str]:
    """What is written of ``value`` before and behind the last of its members that is ``name`` and
    ``held``, for something else to be written there."""
    # What is a client's cannot be taken for it: in JSON its quotation marks are escaped.
    begin, _, end = encode(value).rpartition(f'"{name}":{encode(held)}')
    return f'{begin}"{name}":', end


def array(begin: str, members: Iterable[Iterable[str]], end: str) -> Iterator[str]:
    """Between ``begin`` and ``end`` an array, each of whose members comes in parts, of which there
    is at least one."""
    before = f"{begin}["
    for member in members:
        for part in member:
            yield before + part
            before = ""
        before = ","
    yield f"{before.removesuffix(',')}]{end}"
