"""Calls as Qwen 3 Coder writes them in XML. Pure.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

A value is text, from which one line break at either end is removed. The JSON schema of the tool
states which type the value has. A value that has none of the types is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from router.chat.parsers.base import (
    MAX_NAME,
    CallableTools,
    Json,
    MarkedCallParser,
    NoCall,
    Reading,
    ToolFormat,
)

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_KEY = 256
#: Maximum number of references and combined schemas that are followed for the types of one value.
_MAX_SCHEMAS = 64
_STRING = frozenset({"string"})
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class Qwen3CoderParser(MarkedCallParser):
    """Parser of an output with calls in XML.

    The arguments are emitted as a JSON object. Strings are emitted as they are read, and values of
    other types when they are complete. Some models omit the outer marks.
    """

    _opens = (_CALL, _FUNCTION)

    def __init__(self, tools: CallableTools) -> None:
        #: what precedes the next key of the object
        self._separator = ""
        super().__init__(tools)

    def _calls(self, mark: str) -> Reading[None]:
        if mark == _CALL and not (yield from self._read_mark(_FUNCTION)):
            raise NoCall
        name = self._known((yield from self._read_until(">", MAX_NAME)))
        self._drop()
        self._at_end = self._drop
        self._emit_call(name)
        self._separator = "{"
        schema = self._tools.schemas[name]
        marks = _PARAMETER, _FUNCTION_END, _CALL_END
        while (mark := (yield from self._read_mark(*marks))) == _PARAMETER:
            try:
                yield from self._parameter(schema)
            except NoCall:
                mark = ""
                break
        self._add_arguments("{}" if self._separator == "{" else "}")
        if not mark:
            # The call has begun, so it remains a call. The text is read again as content.
            if not self._tools.is_parallel:
                yield from self._ignore_rest()
            self._drop_space()
            return
        yield from self._end_call()
        if mark == _FUNCTION_END:
            if (yield from self._read_mark(_CALL_END)):
                yield from self._end_call()
            else:
                self._drop_space()

    def _parameter(self, schema: Json) -> Reading[None]:
        key = yield from self._read_until(">", _MAX_KEY)
        self._drop()
        self._add_arguments(f"{self._separator}{_json(key)}: ")
        self._separator = ", "
        types = _types(schema, key)
        if types <= _STRING:
            yield from self._string()
        else:
            yield from self._typed(types)
        self._at_end = self._drop

    def _string(self) -> Reading[None]:
        self._add_arguments('"')
        self._at_end = self._emit_string
        if (yield from self._read()) == "\n":
            self._drop()
        else:
            self._push_back(1)
        while not (yield from self._ends_value()):
            self._emit_string()
        self._drop()
        self._add_arguments('"')

    def _emit_string(self) -> None:
        self._add_arguments(_json("".join(self._pending))[1:-1])
        self._drop()

    def _typed(self, types: frozenset[str]) -> Reading[None]:
        if (yield from self._read()) == "\n":
            self._drop()
        else:
            self._push_back(1)
        num_chars = 0
        while not (yield from self._ends_value()):
            num_chars = len(self._pending)
        text = "".join(self._pending[:num_chars])
        self._drop()
        self._add_arguments(_typed(text, types))

    def _ends_value(self) -> Reading[bool]:
        """Read the mark that ends a value, with a line break before it if there is one.

        Return False as soon as the text differs. The last character is then put back, to be read
        again, unless it is the first one that was read.
        """
        char = yield from self._read()
        has_break = char == "\n"
        if has_break:
            char = yield from self._read()
        if char != _PARAMETER_END[0]:
            if has_break:
                self._push_back(1)
            return False
        return bool((yield from self._rest_of_mark(_PARAMETER_END)))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _typed(text: str, types: frozenset[str]) -> str:
    """Return ``text`` as JSON of one of ``types``, or as a JSON string if it fits none."""
    value = text.strip()
    if "null" in types and value in ("null", "None"):
        return "null"
    if "boolean" in types and value.lower() in ("true", "false"):
        return value.lower()
    if "integer" in types and _INTEGER.fullmatch(value):
        return value
    if "number" in types and _NUMBER.fullmatch(value):
        return value
    kinds = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
    return value if kinds and isinstance(_loaded(value), kinds) else _json(text)


def _loaded(text: str) -> object:
    """Return the value of a JSON text, or None if the text is not valid JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(name)


def _types(schema: Json, key: str) -> frozenset[str]:
    """Return the types that a function's schema allows for the value of ``key``.

    The result is empty if the schema states none.
    """
    types: set[str] = set()
    schemas, num_schemas = [_property(schema, key)], 0
    while schemas and num_schemas < _MAX_SCHEMAS:
        num_schemas += 1
        part = schemas.pop()
        if isinstance(part, Mapping):
            types.update(_own_types(part))
            schemas += _parts(part, schema)
    return frozenset(types)


def _property(schema: Json, key: str) -> Json:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def _own_types(schema: Mapping[str, Json]) -> Iterator[str]:
    given = schema.get("type")
    if given is not None:
        yield from (it for it in (given if isinstance(given, list) else [given]) if type(it) is str)
        return
    values = schema.get("enum")
    yield from map(_type_of, values if isinstance(values, list) else ())
    if "const" in schema:
        yield _type_of(schema["const"])


def _type_of(value: Json) -> str:
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return "null" if value is None else names.get(type(value), "string")


def _parts(schema: Mapping[str, Json], root: Json) -> Iterator[Json]:
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(keyword), list):
            yield from parts
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        yield _referred(root, reference)


def _referred(root: Json, reference: str) -> Json:
    target = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def _is_shown(template: str) -> bool:
    return _FUNCTION in template and _PARAMETER in template


QWEN3_CODER = ToolFormat("qwen3_coder", (_CALL, _CALL_END), Qwen3CoderParser, _is_shown)
