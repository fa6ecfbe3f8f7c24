"""Runner of examples in documents and docstrings.

Examples may use await at the top level. Their output is compared with the output that they show.
"""

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
    """Check the ``>>>`` examples of ``text`` one after the other; return their number."""
    examples = doctest.DocTestParser().get_examples(text)
    for example in examples:
        got = await _printed(example.source, names)
        options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
        wanted = example.want
        if example.exc_msg is not None:
            got, wanted = got.splitlines()[-1], example.exc_msg
        # The last line may lack its newline.
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
    """Yield name and value of the public methods and properties that a class itself defines."""
    for name, member in vars(kind).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            yield name, member
