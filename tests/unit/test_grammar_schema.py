"""What becomes of a schema before xgrammar reads it."""

import json
from typing import Any

import pytest

from worker.grammar.schema import NotEnforceable, enforceable


def narrowed(schema: Any) -> Any:
    return json.loads(enforceable(json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": ["string", "null"], "minLength": 2},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "description": "said of it"},
        {"type": "object", "properties": {"not": {}}, "additionalProperties": {"type": "null"}},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
        {"oneOf": [{"type": "string"}, {"type": "null"}], "title": "a title"},
    ],
)
def test_what_xgrammar_takes_literally_stays(schema: Any) -> None:
    assert narrowed(schema) == schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"minLength": 3}, {"type": "string", "minLength": 3}),
        ({"items": {"minimum": 1}}, {"type": "array", "items": {"type": "number", "minimum": 1}}),
        (
            {"type": "object", "required": ["z"]},
            {"type": "object", "required": ["z"], "properties": {"z": True}},
        ),
        (
            {"type": "object", "properties": {"a": {}}},
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        ),
        ({"type": "string", "enum": ["a", 1]}, {"enum": ["a"]}),
        ({"type": ["integer", "null"], "enum": [1, None, True, 1.5]}, {"enum": [1, None]}),
        ({"type": "string", "const": "a"}, {"enum": ["a"]}),
        (
            {"anyOf": [{"maximum": 1}], "$defs": {"n": {"pattern": "a"}}},
            {
                "anyOf": [{"type": "number", "maximum": 1}],
                "$defs": {"n": {"type": "string", "pattern": "a"}},
            },
        ),
    ],
)
def test_what_it_would_pass_over_is_said_in_its_words(schema: Any, expected: Any) -> None:
    assert narrowed(schema) == expected


def tagged(*values: Any, **more: Any) -> dict[str, Any]:
    """An object whose tag is one of these."""
    properties = {"tag": {"enum": [*values]}}
    described = {"type": "object", "properties": properties, "additionalProperties": False}
    return described | {"required": ["tag"]} | more


@pytest.mark.parametrize(
    ("one", "other", "is_apart"),
    [
        (tagged("cat"), tagged("dog", "wolf"), True),
        ({"$ref": "#/$defs/a~1b"}, tagged("dog"), True),
        (tagged("cat"), tagged("dog", "cat"), False),
        # 1 and 1.0 are the same
        (tagged("cat"), tagged(1), False),
        # one without its tag may be either
        (tagged("cat", required=[]), tagged("dog"), False),
        (tagged("cat"), {"type": "object"}, False),
        (tagged("cat", type=["object", "null"]), tagged("dog", type=["object", "null"]), False),
        ({"$ref": "#/$defs/none"}, tagged("dog"), False),
        ({"$ref": "#/oneOf/0"}, tagged("dog"), False),
    ],
)
def test_what_a_tag_tells_apart_may_be_any(one: Any, other: Any, is_apart: bool) -> None:
    schema = {"oneOf": [one, other], "$defs": {"a/b": tagged("cat")}}
    expected = {"anyOf" if is_apart else "oneOf": [one, other], "$defs": {"a/b": tagged("cat")}}
    assert narrowed(schema) == expected


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ({"not": {"type": "string"}}, "not cannot be enforced"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be enforced"),
        ({"if": {}, "then": {}}, "if cannot be enforced"),
        ({"anyOf": [{}], "minimum": 5}, "minimum cannot be enforced beside anyOf"),
        ({"$ref": "#", "type": "object"}, "type cannot be enforced beside \\$ref"),
        ({"allOf": [{}], "anyOf": [{}]}, "allOf cannot be enforced beside anyOf"),
        ({"properties": {}, "patternProperties": {}}, "cannot be enforced together"),
        ({"minLength": 1, "minimum": 1}, "type must say which of string and number is meant"),
        ({"type": "string", "enum": [1]}, "no value of enum or const is of the type"),
        (
            {"required": ["z"], "additionalProperties": False},
            "'z' is required, but is none of the properties",
        ),
        ({"properties": {"a": 7}}, "7 stands where a schema should"),
        ({"type": [{}], "enum": [1]}, "type must be a name or a list of names"),
        ({"required": "a"}, "required must be a list of names"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, cause: str) -> None:
    with pytest.raises(NotEnforceable, match=cause):
        narrowed({"type": "array", "items": schema})


@pytest.mark.parametrize("text", ['{"type":', "", "nan,"])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(NotEnforceable, match="the schema is not JSON"):
        enforceable(text)


@pytest.mark.parametrize("depth", [65, 1_000, 30_000])
def test_deep_schemas_are_refused(depth: int) -> None:
    with pytest.raises(NotEnforceable, match="more than 64 levels deep"):
        enforceable('{"items":' * depth + "{}" + "}" * depth)
