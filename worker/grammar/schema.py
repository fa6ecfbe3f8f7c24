"""A JSON schema in words that xgrammar takes literally. Pure.

xgrammar passes over what it cannot express, and reads some keywords in a sense of its own. Here a
schema is given the same meaning in words that it does take literally, or a narrower one (a text
that fits it fits the schema too), or it is refused by the keyword's name. What xgrammar itself
warns of, the keeper refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

Json = Any

#: Deeper schemas take xgrammar longer than anybody would wait.
_MAX_DEPTH = 64

_BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
        | {"minProperties", "maxProperties", "unevaluatedProperties"}
    ),
    "array": frozenset(
        {"items", "prefixItems", "minItems", "maxItems", "contains", "minContains", "maxContains"}
        | {"unevaluatedItems"}
    ),
}
_TYPED = frozenset().union(*_BY_TYPE.values())
#: Beside one of these xgrammar reads nothing else.
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_REFUSED = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"$dynamicRef", "$recursiveRef"}
)
#: Where xgrammar enforces the one keyword, it does not enforce the other.
_APART = (
    ("properties", "patternProperties"),
    ("properties", "propertyNames"),
    ("patternProperties", "propertyNames"),
    ("contains", "items"),
    ("contains", "prefixItems"),
)
_OF_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_A_SCHEMA = (
    "items",
    "contains",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
)
_IS_OF_TYPE: dict[str, Callable[[Json], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
}


class NotEnforceable(ValueError):
    """No grammar would keep an output to this schema."""


def enforceable(text: str) -> str:
    """The schema that xgrammar is to compile for schema ``text``. Raises NotEnforceable."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise NotEnforceable(f"the schema is more than {_MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise NotEnforceable(f"the schema is not JSON: {error}") from None
    return json.dumps(_narrowed(schema, schema, depth=0))


def _narrowed(schema: Json, root: Json, depth: int) -> Json:
    """``root`` is what references lead from."""
    if depth > _MAX_DEPTH:
        raise NotEnforceable(f"the schema is more than {_MAX_DEPTH} levels deep")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise NotEnforceable(f"{json.dumps(schema)[:40]} stands where a schema should")
    _refuse(schema)
    result = _with_type(schema)
    _narrow_values(result)
    _narrow_object(result)
    if "oneOf" in result and _are_apart(result["oneOf"], root):
        result["anyOf"] = result.pop("oneOf")
    _narrow_parts(result, root, depth + 1)
    return result


def _refuse(schema: Json) -> None:
    if refused := sorted(_REFUSED.intersection(schema)):
        raise NotEnforceable(f"{refused[0]} cannot be enforced")
    if schema.get("uniqueItems"):
        raise NotEnforceable("uniqueItems cannot be enforced")
    for one, other in _APART:
        if one in schema and other in schema:
            raise NotEnforceable(f"{one} and {other} cannot be enforced together")
    whole = [key for key in _WHOLE if key in schema]
    beside = sorted(_TYPED.intersection(schema)) if whole else []
    if whole and "type" in schema and whole[0] not in ("enum", "const"):
        beside.append("type")
    if others := whole[1:] + beside:
        raise NotEnforceable(f"{others[0]} cannot be enforced beside {whole[0]}")


def _with_type(schema: Json) -> Json:
    """Keywords bind only values of their type, and xgrammar reads them only beside it."""
    types = [name for name, keywords in _BY_TYPE.items() if keywords.intersection(schema)]
    if "type" in schema or not types:
        return dict(schema)
    if len(types) > 1:
        raise NotEnforceable(f"type must say which of {' and '.join(types)} is meant")
    return {"type": types[0], **schema}


def _narrow_values(schema: Json) -> None:
    """Those of the type alone remain."""
    if "type" not in schema or not ("enum" in schema or "const" in schema):
        return
    types = _listed(schema.pop("type"))
    if not all(isinstance(name, str) for name in types):
        raise NotEnforceable("type must be a name or a list of names")
    values = schema.pop("enum") if "enum" in schema else [schema.pop("const")]
    schema["enum"] = [value for value in _listed(values) if _is_of(value, types)]
    if not schema["enum"]:
        raise NotEnforceable("no value of enum or const is of the type")


def _is_of(value: Json, types: Collection[str]) -> bool:
    return any(name in _IS_OF_TYPE and _IS_OF_TYPE[name](value) for name in types)


def _listed(value: Json) -> list[Json]:
    return value if isinstance(value, list) else [value]


def _narrow_object(schema: Json) -> None:
    """What is required becomes a property, and an object that names its properties has no others,
    unless it says so: a model is apt to invent them without end."""
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise NotEnforceable("required must be a list of names")
    names = schema.get("properties", {})
    if not isinstance(names, dict):
        raise NotEnforceable("properties must be an object")
    others = schema.get("additionalProperties", True)
    if missing := [name for name in required if name not in names]:
        if others is False or "patternProperties" in schema or "propertyNames" in schema:
            raise NotEnforceable(f"{missing[0]!r} is required, but is none of the properties")
        schema["properties"] = {**names, **dict.fromkeys(missing, others)}
    if names and not {"additionalProperties", "unevaluatedProperties"}.intersection(schema):
        schema["additionalProperties"] = False


def _are_apart(parts: Json, root: Json) -> bool:
    """No value fits two of them: each requires a property whose texts no other one takes, such as
    the tag of a union. xgrammar sees that of no reference."""
    if not isinstance(parts, list) or not parts:
        return False
    tags = [_tags(part, root) for part in parts]
    for name in set(tags[0]).intersection(*tags[1:]):
        texts = [text for each in tags for text in each[name]]
        if len(texts) == len(set(texts)):
            return True
    return False


def _tags(schema: Json, root: Json) -> dict[str, set[str]]:
    """The properties that an object requires and that are one of some texts."""
    schema = _referred(schema, root)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {
        name: texts
        for name, value in properties.items()
        if name in required and (texts := _texts(value))
    }


def _texts(schema: Json) -> set[str]:
    """Those that alone fit; none where something else does."""
    if not isinstance(schema, dict) or not ("enum" in schema or "const" in schema):
        return set()
    values = _listed(schema["enum"] if "enum" in schema else schema["const"])
    return set(values) if all(isinstance(value, str) for value in values) else set()


def _referred(schema: Json, root: Json) -> Json:
    """What a reference leads to, if it leads anywhere."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = _at(str(schema["$ref"]), root)
    return None


def _at(pointer: str, root: Json) -> Json:
    place, *names = pointer.split("/")
    found = root if place == "#" else None
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _narrow_parts(schema: Json, root: Json, depth: int) -> None:
    for key in _OF_SCHEMAS_BY_NAME:
        if isinstance(schema.get(key), dict):
            schema[key] = {name: _narrowed(part, root, depth) for name, part in schema[key].items()}
    for key in _OF_SCHEMAS:
        if isinstance(schema.get(key), list):
            schema[key] = [_narrowed(part, root, depth) for part in schema[key]]
    for key in _OF_A_SCHEMA:
        if key in schema:
            schema[key] = _narrowed(schema[key], root, depth)
