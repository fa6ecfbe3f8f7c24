"""Tools of a request: their definitions, the choice of a call, and the output's grammar. Pure.

    tool_choice     the output                                  is read as
    none            anything; the template shows no tools       content
    auto            anything                                    content, calls in the model's format
    required        a JSON array of calls, by a grammar         calls
    a function      its arguments, by a grammar                 one call of it

Only a grammar enforces a tool's schema, whether or not the function is ``strict``. With auto there
is no grammar, so the model can write anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Self

from everlift.errors import GrammarTooLarge, InvalidRequest, OutOfRange, ToolsUnsupported
from everlift.sampling import Grammar, GrammarKind
from router.chat.checks import check_function_name, check_json
from router.chat.deltas import call_id
from router.chat.parsers.arguments import ArgumentsParser
from router.chat.parsers.base import CallableTools, Parser, ToolFormat
from router.chat.parsers.listed import ListedCallParser
from router.chat.parsers.plain import PlainParser

Json = Any

#: Maximum number of tools of a request, as in OpenAI's API.
MAX_TOOLS = 128
#: Maximum bytes of one tool as JSON.
MAX_TOOL_BYTES = 64 << 10
#: Maximum bytes of all tools together as JSON.
MAX_BYTES = 512 << 10
_NO_PARAMETERS: Mapping[str, Json] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
#: Key of a call's arguments if the model's format is unknown.
_ARGUMENTS = "arguments"
#: Keywords of a schema that cannot be combined with the keyword ``type`` in a grammar.
_WHOLE = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
#: Keywords whose value is an object of schemas by name. The names are not keywords.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
#: Keywords whose values are data and not schemas.
_DATA = frozenset({"const", "default", "enum", "examples"})


class Choice(Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    #: one function, by its name
    NAMED = "function"


@dataclass(frozen=True, slots=True)
class Function:
    """Function that the model may call.

    ``shown`` is the tool definition that the chat template receives, and ``parameters`` is the JSON
    schema of the function's arguments.
    """

    name: str
    shown: Json
    parameters: Json


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request, and the calls that its tool_choice allows or requires.

    ``named`` is the function's name for Choice.NAMED, else empty. Unless ``is_parallel``, the
    output has at most one call. ``allowed`` are the names of the functions that may be called; None
    means all. The template shows the other functions as well, so that prompts with different
    ``allowed`` share cached prefixes.
    """

    functions: tuple[Function, ...]
    choice: Choice
    named: str = ""
    is_parallel: bool = True
    allowed: frozenset[str] | None = None

    @classmethod
    def of(cls, tools: object, tool_choice: object, parallel: bool) -> Self:
        """Parse the ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request.

        ``tools`` and ``tool_choice`` are None if they are absent. Raises OutOfRange for too many,
        too large or too deeply nested tools, NotUtf8 for an unpaired surrogate, and InvalidRequest
        for other faults.
        """
        choice, named, allowed = _choice(tool_choice)
        return cls.checked(_functions(tools), choice, named, parallel, allowed)

    @classmethod
    def checked(
        cls,
        functions: tuple[Function, ...],
        choice: Choice,
        named: str = "",
        is_parallel: bool = True,
        allowed: frozenset[str] | None = None,
    ) -> Self:
        """Create the tools of a request.

        Raises InvalidRequest if a call is required without tools, or if ``named`` or one of
        ``allowed`` is not the name of a function. An empty ``named`` is not checked.
        """
        names = [function.name for function in functions]
        if choice in (Choice.REQUIRED, Choice.NAMED) and not functions:
            raise InvalidRequest("tool_choice requires a call, but there are no tools")
        for name in {named} - {""} | (allowed or frozenset()):
            if name not in names:
                raise InvalidRequest(f"tool_choice names {name}, which is not in tools")
        if not functions:
            choice = Choice.NONE
        return cls(functions, choice, named, is_parallel, allowed)

    @property
    def callable(self) -> tuple[Function, ...]:
        """Return the functions that the output may call."""
        if self.allowed is None:
            return self.functions
        return tuple(function for function in self.functions if function.name in self.allowed)

    @property
    def shown(self) -> list[Json] | None:
        """Return the tools that the template receives, or None if it receives none."""
        if self.choice is Choice.NONE:
            return None
        return [function.shown for function in self.functions]

    def grammar(self, form: ToolFormat | None) -> Grammar | None:
        """Return the grammar of the output, or None if the output is unconstrained.

        ``form`` is the model's format of calls, or None if it is unknown. Raises ToolsUnsupported
        if the format is unknown and tool_choice is auto, because the parser then needs it. Raises
        GrammarTooLarge, with the field ``tools``, for schemas that are too large.
        """
        match self.choice:
            case Choice.NAMED:
                schema = self._function(self.named).parameters
            case Choice.REQUIRED:
                schema = self._calls_schema(form.arguments if form else _ARGUMENTS)
            case Choice.AUTO if form is None:
                raise ToolsUnsupported(
                    "the chat template does not show how this model writes tool calls: set "
                    "router.tool_format, or use the tool_choice required or a function"
                )
            case _:
                return None
        try:
            return Grammar(GrammarKind.JSON_SCHEMA, (json.dumps(schema, ensure_ascii=False),))
        except GrammarTooLarge as error:
            error.field = "tools"
            raise

    def parser(self, form: ToolFormat | None, request_id: str, choice: int) -> Parser:
        """Return the parser of the output of choice number ``choice``.

        The ids of calls are derived from the request's id and this number. ``form`` must be the one
        given to ``grammar``. If tool_choice requires a call, the grammar holds from the first
        token, so the output has no reasoning.
        """
        identify = partial(call_id, request_id, choice)
        schemas = {} if self.choice is Choice.NONE else self._schemas
        tools = CallableTools(schemas, identify, self.is_parallel)
        match self.choice:
            case Choice.NAMED:
                return ArgumentsParser(self.named, tools)
            case Choice.REQUIRED:
                return ListedCallParser(tools)
            case Choice.NONE if form is None or not form.has_channels:
                return PlainParser()
        assert form is not None, "grammar() rejects tools in an unknown format"
        return form.parser(tools)

    @property
    def _schemas(self) -> Mapping[str, Json]:
        return {function.name: function.parameters for function in self.callable}

    def _function(self, name: str) -> Function:
        return next(function for function in self.functions if function.name == name)

    def _calls_schema(self, arguments: str) -> Json:
        """Return the JSON schema of an array of calls of the functions that the output may call.

        The array has at least one call, and only one unless ``is_parallel``. ``arguments`` is the
        key of a call's arguments. The schema of each function's arguments is embedded; its
        references to itself are changed to its new position.
        """
        schema: Json = {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [_call_schema(arguments, one) for one in self.callable]},
            "$defs": {one.name: _definition(one) for one in self.callable},
        }
        return schema if self.is_parallel else {**schema, "maxItems": 1}


def _call_schema(arguments: str, function: Function) -> Json:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            arguments: {"$ref": _root(function.name)},
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _root(name: str) -> str:
    return f"#/$defs/{name}"


def _definition(function: Function) -> Json:
    """Return the schema of a function's arguments, to be embedded in another schema.

    The schema's `$id` is removed, and its references to itself are changed to its position in the
    other schema. Its anchors are prefixed with the function's name, which makes them unique there.
    """
    base = function.parameters.get("$id")
    bases = {"", base.partition("#")[0]} if isinstance(base, str) else {""}
    schema = {key: value for key, value in function.parameters.items() if key != "$id"}
    return _rooted(schema, function.name, bases)


def _rooted(schema: Json, function: str, bases: Set[str]) -> Json:
    """Return ``schema`` with references to itself redirected to the position of ``function``.

    A reference is to the schema itself if the part before its ``#`` is one of ``bases``.
    """
    if isinstance(schema, list):
        return [_rooted(part, function, bases) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _rooted_value(key, value, function, bases) for key, value in schema.items()}


def _rooted_value(key: str, value: Json, function: str, bases: Set[str]) -> Json:
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _rooted(part, function, bases) for name, part in value.items()}
    if key == "$anchor" and isinstance(value, str):
        return _anchor(function, value)
    if key == "$ref" and isinstance(value, str):
        base, _, target = value.partition("#")
        if base not in bases:
            return value
        is_anchor = target and not target.startswith("/")
        return f"#{_anchor(function, target)}" if is_anchor else _root(function) + target
    return value if key in _DATA else _rooted(value, function, bases)


def _anchor(function: str, anchor: str) -> str:
    # The name of a function has no dots.
    return f"{function}.{anchor}"


def _choice(raw: object) -> tuple[Choice, str, frozenset[str] | None]:
    if raw is None:
        return Choice.AUTO, "", None
    if isinstance(raw, str) and raw in ("none", "auto", "required"):
        return Choice(raw), "", None
    kind = raw.get("type") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or kind not in (Choice.NAMED.value, "allowed_tools"):
        raise InvalidRequest(
            "tool_choice must be none, auto, required, or an object of type function or "
            "allowed_tools"
        )
    if kind == "allowed_tools":
        return allowed_tools("tool_choice.allowed_tools", raw.get("allowed_tools"), _called)
    return Choice.NAMED, _called("tool_choice", raw), None


def _called(at: str, tool: Mapping[str, object]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return check_function_name(f"{at}.function.name", name)


def allowed_tools(
    at: str, raw: object, name_of: Callable[[str, Mapping[str, object]], str]
) -> tuple[Choice, str, frozenset[str]]:
    """Parse a tool_choice that allows only some of the tools; errors name its position ``at``.

    Returns ``choice``, ``named`` (empty) and ``allowed`` as ``ToolUse`` has them. ``name_of``
    receives the position of a tool and the tool, and returns the name of its function. Raises
    InvalidRequest.
    """
    mode = raw.get("mode") if isinstance(raw, dict) else None
    tools = raw.get("tools") if isinstance(raw, dict) else None
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{at}.mode must be auto or required")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"{at}.tools must be a list of at least one tool")
    names = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidRequest(f"{at}.tools[{i}] must be an object of type function")
        names.append(name_of(f"{at}.tools[{i}]", tool))
    return Choice(mode), "", frozenset(names)


def _functions(tools: object) -> tuple[Function, ...]:
    if tools == []:
        raise InvalidRequest("tools must have at least one tool, not []", field="tools")
    return functions_of(tools, _functions_at)


def functions_of(
    tools: object, functions_at: Callable[[str, object], Sequence[Function]]
) -> tuple[Function, ...]:
    """Parse the list of a request's tools; None means no tools.

    ``functions_at`` receives the position of a tool in the request and the tool, and returns its
    functions; an ignored tool has none. Raises OutOfRange for too many, too large or too deeply
    nested tools, NotUtf8 for an unpaired surrogate, and InvalidRequest for other faults.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequest("tools must be a list")
    _check_count(tools)
    check_json("tools", tools, MAX_BYTES)
    functions: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        for function in functions_at(f"tools[{i}]", tool):
            if function.name in functions:
                raise InvalidRequest(
                    f"tools[{i}] has the same name as an earlier tool: {function.name}"
                )
            functions[function.name] = function
    _check_count(functions)
    return tuple(functions.values())


def _check_count(tools: Collection[object]) -> None:
    if len(tools) > MAX_TOOLS:
        raise OutOfRange(f"tools has {len(tools)} tools; at most {MAX_TOOLS} are allowed")


def _functions_at(at: str, tool: object) -> list[Function]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest(f"{at} must be an object of type function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{at}.function must be an object")
    return [checked_function(f"{at}.function", function)]


def checked_function(at: str, function: Mapping[str, Json], schema: str = "parameters") -> Function:
    """Return the function that an object defines; errors name the object's position ``at``.

    ``schema`` is the name of the member with the JSON schema of the arguments. Raises the errors of
    ``functions_of``.
    """
    check_json(at, function, MAX_TOOL_BYTES)
    name = check_function_name(f"{at}.name", function.get("name"))
    _check_types(at, function, schema)
    parameters = function.get(schema) or _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{at}.{schema} must be the schema of an object")
    shown: dict[str, Json] = {"name": name}
    if function.get("description") is not None:
        shown["description"] = function["description"]
    return Function(
        name,
        {"type": "function", "function": {**shown, "parameters": parameters}},
        parameters if _WHOLE & parameters.keys() else {"type": "object", **parameters},
    )


def _check_types(at: str, function: Mapping[str, Json], schema: str) -> None:
    for key, kind, words in (
        ("description", str, "a string"),
        (schema, dict, "a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise InvalidRequest(f"{at}.{key} must be {words}")
