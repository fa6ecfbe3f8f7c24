"""JSON schemas in the form that llguidance compiles. Pure.

llguidance enforces the schema and refuses keywords that it cannot enforce. This module prepares
the schema for it:

- An object that declares properties and has no rule for others is closed to others, because small
  models tend to invent keys without end. It stays open if another schema may add properties, such
  as another branch of an `allOf`, or one that has a `$ref` to the object and further keywords.
- Formats that llguidance does not know are removed, because in JSON Schema they are annotations.
- The property that a discriminator names is required in each branch.
- A list under `items`, as in drafts before 2020-12, becomes `prefixItems`, and `additionalItems`
  becomes `items`. Without a list under `items`, `additionalItems` is removed.
- An exclusive bound that llguidance would allow as a value is moved slightly inwards, unless the
  type is integer (``_moved_bounds``).
- A branch of `anyOf` whose pattern has a look-around is removed if another branch remains. Pydantic
  writes such a branch for Decimal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import inf, ulp
from typing import Any
from urllib.parse import unquote

Json = Any
Path = tuple[str, ...]

MAX_DEPTH = 64
#: Largest absolute value of a number in a schema, because llguidance reads numbers as doubles.
_MAX_NUMBER = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: Smallest distance by which an exclusive bound is moved.
_BOUND_STEP = 1e-9
FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
    | {"unknown"}
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
#: Keywords whose schemas apply to the same value as the schema that has the keyword.
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
#: An object schema with one of these keywords is not closed: it has a rule for undeclared
#: properties, or another schema may add some.
_ADDS_PROPERTIES = _IN_PLACE | frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties"}
)
#: Keywords that may declare properties of an object, directly or in their schemas.
_DECLARES = _IN_PLACE | {"properties", "patternProperties"}
_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,15}", "lenient": False, "coerce_one_of": False}
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]*)"')
_SURROGATE = re.compile("[\ud800-\udfff]")


class NotEnforceable(ValueError):
    """Raised if a schema cannot be enforced; the message has the cause and, if known, the path."""


def parse_schema(text: str) -> Json:
    """Parse the JSON schema ``text``, and return it with the changes that the module lists.

    Raises NotEnforceable if the text is not a schema, or the schema cannot be enforced.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise NotEnforceable(f"the schema is more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise NotEnforceable(f"the schema is not JSON: {error}") from None
    if schema is False:
        raise NotEnforceable("the schema is false: no value fits")
    if schema is not True and not isinstance(schema, dict):
        raise NotEnforceable("the schema must be an object or a boolean")
    _check_value(schema, ())
    _close_objects(schema)
    return _prepared({} if schema is True else schema, ())


def lark_of_schema(schema: Json) -> str:
    """Return the grammar of a result of ``parse_schema``, in llguidance's Lark syntax."""
    return f"start: %json {json.dumps(schema | {'x-guidance': _OPTIONS})}\n"


def refusal_of(schema: Json, cause: str) -> str:
    """Return the error message for a schema that llguidance refused with ``cause``."""
    if (found := _UNIMPLEMENTED.match(cause)) is not None:
        path = next(_paths_of(schema, found[1]), (found[1],))
        return f"{'.'.join(path)[-200:]} cannot be enforced"
    return f"the schema cannot be enforced: {cause}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check_value(value: Json, path: Path) -> None:
    """Raise NotEnforceable if ``value`` is nested too deeply or has half of a surrogate pair.

    ``path`` has the keys and indices that lead from the root of the schema to ``value``.
    """
    if len(path) > 2 * MAX_DEPTH:
        raise NotEnforceable(f"the schema is more than {MAX_DEPTH} levels deep")
    if isinstance(value, str) and _SURROGATE.search(value):
        raise NotEnforceable(f"{'.'.join(path)} has half of a surrogate pair")
    if isinstance(value, dict):
        for key, part in value.items():
            _check_value(key, path)
            _check_value(part, (*path, key))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            _check_value(part, (*path, str(at)))


def _moved_bounds(schema: Mapping[str, Json]) -> dict[str, float]:
    """Return replacements for those exclusive bounds that llguidance may allow as values.

    A replacement is the bound, moved slightly inwards. llguidance 1.9 allows "-0" as a number below
    0. An integral exclusive bound may also be allowed if the other bound is less than 1 away. The
    value 1, for example, is allowed where numbers must be above 1 and below 1.25.
    """
    least = max(_bounds(schema, "minimum", "exclusiveMinimum"), default=-inf)
    most = min(_bounds(schema, "maximum", "exclusiveMaximum"), default=inf)
    moved = {}
    for low in _bounds(schema, "exclusiveMinimum"):
        if low == int(low) and most < low + 1:
            moved["exclusiveMinimum"] = low + max(_BOUND_STEP, ulp(low))
    for high in _bounds(schema, "exclusiveMaximum"):
        if high == int(high) and (not high or least > high - 1):
            moved["exclusiveMaximum"] = high - max(_BOUND_STEP, ulp(high))
    return moved


def _bounds(schema: Mapping[str, Json], *names: str) -> list[float]:
    values = (schema.get(name) for name in names)
    return [
        value for value in values if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _close_objects(root: Json) -> None:
    """Forbid undeclared properties in the object schemas of the whole schema ``root``, in place.

    Only schemas that declare properties are closed; required properties count as declared. A schema
    stays open if it has a rule for other properties, or if another schema may add properties to the
    same object. A schema may be used in several places, directly or by `$ref`, and stays open if
    another schema may add properties in one of these places.
    """
    # by id, because a dict has no hash
    schemas: dict[int, dict[str, Json]] = {}
    open_ids: set[int] = set()
    pending = [(root, True)]
    while pending:
        schema, may_close = pending.pop()
        if not isinstance(schema, dict) or id(schema) in (schemas if may_close else open_ids):
            continue
        schemas[id(schema)] = schema
        if not may_close:
            open_ids.add(id(schema))
        pending += _subschemas(schema, may_close, root)
    for key in schemas.keys() - open_ids:
        if "properties" in schemas[key] and not _ADDS_PROPERTIES & schemas[key].keys():
            _close(schemas[key])


def _subschemas(
    schema: Mapping[str, Json], may_close: bool, root: Json
) -> Iterator[tuple[Json, bool]]:
    """Yield the parts of ``schema`` and its `$ref`'s target, each with whether it may be closed.

    ``may_close`` is whether ``schema`` itself may be closed. Parts that apply to other values than
    ``schema`` does, such as properties, may always be closed. A part that applies to the same value
    may be closed only if ``schema`` may be, and if nothing else in ``schema`` may declare
    properties. The target counts as such a part, and is None if the `$ref` points to nothing. Other
    branches of the same `anyOf` or `oneOf` do not count as something else. ``root`` is the whole
    schema.
    """
    is_alone = len(_DECLARES & schema.keys()) == 1
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            parts: list[Json] = [*value.values()]
        elif keyword in (*_LISTS, *_SINGLE, "additionalItems"):
            parts = value if isinstance(value, list) else [value]
        elif keyword == "$ref":
            parts = [_target_of(value, root)]
        else:
            continue
        is_only = is_alone and (keyword != "allOf" or len(parts) == 1)
        may_close_parts = keyword not in _IN_PLACE or (may_close and is_only)
        yield from ((part, may_close_parts) for part in parts)


def _target_of(reference: Json, root: Json) -> Json:
    """Return the part of ``root`` to which ``reference`` points.

    Returns None if ``reference`` points to nothing, or is not a JSON pointer but, for example, an
    anchor.
    """
    _, hash_sign, pointer = str(reference).partition("#")
    first, *keys = unquote(pointer).split("/")
    if not hash_sign or first:
        return None
    part = root
    try:
        for key in keys:
            name = key.replace("~1", "/").replace("~0", "~")
            part = part[int(name)] if isinstance(part, list) else part[name]
    except (LookupError, TypeError, ValueError):
        return None
    return part


def _prepared(schema: Json, path: Path) -> Json:
    """Return a copy of ``schema`` with the module's changes, except that no object is closed.

    ``schema`` is a part of the whole schema. ``path`` has the keys and indices that lead to it from
    the root, for error messages. Raises NotEnforceable if llguidance would enforce a keyword
    wrongly.
    """
    if not isinstance(schema, dict):
        return schema
    for keyword in ("const", "enum", *_BOUNDS):
        if _has_large_number(schema.get(keyword)):
            raise NotEnforceable(
                f"{'.'.join((*path, keyword))} has a number beyond 2^53, which cannot be enforced"
            )
    schema = _without_additional_items(schema)
    if _has_too_many_keys(schema):
        raise NotEnforceable(
            f"{'.'.join((*path, 'minProperties'))} cannot be enforced above the number of required "
            "properties plus one, because a key may be written twice"
        )
    result = dict(schema)
    if schema.get("type") != "integer":
        result |= _moved_bounds(schema)
    if result.get("format") not in FORMATS:
        result.pop("format", None)
    for keyword in _MAPS:
        if isinstance(part := schema.get(keyword), dict):
            result[keyword] = {
                name: _prepared(child, (*path, keyword, name)) for name, child in part.items()
            }
    for keyword in _SINGLE:
        if isinstance(part := schema.get(keyword), dict):
            result[keyword] = _prepared(part, (*path, keyword))
    tag = _tag_of(schema)
    for keyword in _LISTS:
        if isinstance(part := schema.get(keyword), list):
            branches = [
                _prepared(branch, (*path, keyword, str(at))) for at, branch in enumerate(part)
            ]
            if keyword == "anyOf":
                branches = [branch for branch in branches if not _looks_around(branch)] or branches
            if tag is not None and keyword in ("anyOf", "oneOf"):
                branches = [{"allOf": [branch], "required": [tag]} for branch in branches]
            result[keyword] = branches
    return result


def _without_additional_items(schema: dict[str, Json]) -> dict[str, Json]:
    result = {name: part for name, part in schema.items() if name != "additionalItems"}
    if isinstance(first := schema.get("items"), list):
        result["prefixItems"] = first
        result["items"] = schema.get("additionalItems", True)
    return result


def _has_too_many_keys(schema: Mapping[str, Json]) -> bool:
    least, required = schema.get("minProperties"), schema.get("required", [])
    return isinstance(least, int) and isinstance(required, list) and least > len(required) + 1


def _close(schema: dict[str, Json]) -> None:
    """Close an object schema, in place, to all but its declared and its required properties."""
    schema["additionalProperties"] = False
    if isinstance(schema["properties"], dict) and isinstance(schema.get("required"), list):
        for name in schema["required"]:
            if isinstance(name, str):
                schema["properties"].setdefault(name, True)


def _tag_of(schema: Mapping[str, Json]) -> str | None:
    discriminator = schema.get("discriminator")
    if not isinstance(discriminator, dict):
        return None
    name = discriminator.get("propertyName")
    return name if isinstance(name, str) else None


def _looks_around(schema: Json) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, dict) else None
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None


def _has_large_number(value: Json) -> bool:
    if isinstance(value, dict):
        return any(map(_has_large_number, value.values()))
    if isinstance(value, list):
        return any(map(_has_large_number, value))
    return isinstance(value, int | float) and abs(value) > _MAX_NUMBER


def _paths_of(schema: Json, keyword: str, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each occurrence of ``keyword`` in ``schema``.

    All paths begin at the root of the whole schema; ``path`` leads from there to ``schema``.
    """
    if isinstance(schema, dict):
        if keyword in schema and path[-1:] not in (("properties",), ("patternProperties",)):
            yield (*path, keyword)
        for key, part in schema.items():
            if key not in ("const", "enum", "default", "examples"):
                yield from _paths_of(part, keyword, (*path, key))
    elif isinstance(schema, list):
        for at, part in enumerate(schema):
            yield from _paths_of(part, keyword, (*path, str(at)))
