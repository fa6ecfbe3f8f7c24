"""Functions in namespaces, which a model knows by one joined name. Pure.

A tool of the type namespace groups functions; Codex has one for each MCP server. Chat templates and
formats of calls have no namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from router.chat.checks import check_function_name
from router.chat.parsers.base import MAX_NAME


def joined_name(at: str, named: Mapping[str, object]) -> str:
    """Return the name by which the model knows a function.

    ``named`` is a call, a tool or a tool_choice at the position ``at`` in the request. The members
    are ``name`` and, for a function in a namespace, ``namespace``. Raises InvalidRequest, which
    gives the position, if a member is not a valid function name.
    """
    name = check_function_name(f"{at}.name", named.get("name"))
    namespace = named.get("namespace")
    if namespace is None:
        return name
    return _joined(check_function_name(f"{at}.namespace", namespace), name)


def own_names(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the ``namespace`` and ``name`` of each function in a namespace, by its joined name.

    ``tools`` are the valid tools of a request.
    """
    return {
        _joined(tool["name"], function["name"]): {
            "namespace": tool["name"],
            "name": function["name"],
        }
        for tool in tools
        if tool["type"] == "namespace"
        for function in tool["tools"]
        if function["type"] == "function"
    }


def _joined(namespace: str, name: str) -> str:
    """Return one valid function name that consists of ``namespace`` and ``name``.

    A result longer than MAX_NAME is cut, and then ends with a hash of both names.
    """
    separator = "" if namespace.endswith("_") else "__"
    joined = f"{namespace}{separator}{name}"
    if len(joined) <= MAX_NAME:
        return joined
    digest = blake2b(f"{namespace} {name}".encode(), digest_size=8).hexdigest()
    return f"{joined[: MAX_NAME - len(digest) - 1]}_{digest}"
