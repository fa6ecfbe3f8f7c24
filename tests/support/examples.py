"""Examples in texts for people, run as they stand: with await at the top, and what they print
compared with what they show."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import traceback
from collections.abc import Iterable
from types import CodeType
from typing import Any

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | __import__("__future__").annotations.compiler_flag


async def run(source: str, names: dict[str, Any]) -> str:
    """Return what a program prints in which ``names`` are defined."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        await _execute(compile(source, "<example>", "exec", _FLAGS), names)
    return printed.getvalue()


async def check(text: str, names: dict[str, Any]) -> int:
    """Runs the ``>>>`` examples of ``text``, one after the other; how many there were."""
    examples = doctest.DocTestParser().get_examples(text)
    for example in examples:
        got = await _printed(example.source, names)
        options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
        wanted = example.want
        if example.exc_msg is not None:
            got, wanted = got.splitlines()[-1], example.exc_msg
        # Not every program ends its last line.
        assert doctest.OutputChecker().check_output(wanted.strip(), got.strip(), options), (
            f"{example.source}shows\n{wanted}and gave\n{got}"
        )
    return len(examples)


async def _printed(source: str, names: dict[str, Any]) -> str:
    """Return what an example prints, or the traceback of its exception."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            await _execute(compile(source, "<example>", "single", _FLAGS), names)
        except Exception:
            printed.write(traceback.format_exc())
    return printed.getvalue()


async def _execute(code: CodeType, names: dict[str, Any]) -> None:
    result = eval(code, names)
    if inspect.iscoroutine(result):
        await result


def public(kind: type) -> Iterable[tuple[str, Any]]:
    """Methods and properties that a class itself offers."""
    for name, member in vars(kind).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            yield name, member
