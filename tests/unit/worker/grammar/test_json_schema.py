"""JSON schemas: the texts that their grammars allow, and the causes of refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.worker.json_schema_support import REFUSED_KEYWORDS, TRIE
from worker.grammar.grammar_process import Refused, compile_grammar
from worker.grammar.json_schema import MAX_DEPTH, NotEnforceable


def allows(schema: Any, text: str) -> bool:
    matcher = compile_grammar("json_schema", [json.dumps(schema)], TRIE)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def refusal_of_text(text: str) -> str:
    with pytest.raises((NotEnforceable, Refused)) as caught:
        compile_grammar("json_schema", [text], TRIE)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300
    return str(caught.value)


def refusal(schema: Any) -> str:
    return refusal_of_text(json.dumps(schema))


def of_a(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, **more}


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}}
INTEGER = {"type": "integer"}
HAS_A = of_a(INTEGER, required=["a"])
HAS_B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        # strings
        ({"type": "string", "minLength": 1, "maxLength": 3}, ['"a"', '"é😀"'], ['""', '"abcd"']),
        ({"type": "string"}, ['"\\n"', '"\\""'], ['"\n"', '"\\a"', "1"]),
        ({"type": "string", "pattern": "^ab"}, ['"ab"', '"abc"'], ['"cab"', '"a"']),
        ({"type": "string", "pattern": "b$"}, ['"ab"', '"b"'], ['"ba"']),
        ({"type": "string", "pattern": "ab", "maxLength": 3}, ['"xab"'], ['"xxab"']),
        ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-13-01"', '"a"']),
        ({"type": "string", "format": "of our own"}, ['"anything"'], ["1"]),
        ({"type": "integer", "format": "int32"}, ["1"], ['"a"']),
        # numbers
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 6}, ["3", "5"], ["2", "6", "3.5"]),
        ({"type": "number", "minimum": -0.5, "maximum": 0.5}, ["0.25", "-0.5"], ["0.75", "-1"]),
        ({"type": "number", "exclusiveMaximum": 0}, ["-1", "-0.5"], ["-0", "0", "1"]),
        (
            {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2, "maximum": 1.25},
            ["1.01", "1.25"],
            ["1", "1.0", "1.26"],
        ),
        (
            {"type": "number", "minimum": -12.5, "exclusiveMaximum": -12},
            ["-12.5", "-12.01"],
            ["-12", "-12.0", "-12.6"],
        ),
        ({"type": "integer", "multipleOf": 5}, ["0", "15"], ["12"]),
        # objects
        (of_a(INTEGER), ["{}", '{"a":1}', '{"a": 1}'], ['{"b":1}', '{"a":"x"}']),
        (of_a(INTEGER, additionalProperties=True), ['{"a":1,"b":[]}'], ['{"a":"x"}']),
        (of_a(INTEGER, additionalProperties=INTEGER), ['{"b":2}'], ['{"b":"x"}']),
        (of_a(INTEGER, required=["a", "b"]), ['{"a":1,"b":null}'], ['{"a":1}']),
        ({"type": "object"}, ['{"x":{"y":[1]}}'], ["[]"]),
        ({"type": "object", "patternProperties": {"^x-": INTEGER}, "additionalProperties": False},
         ['{"x-a":1}'], ['{"x-a":"1"}', '{"a":1}']),
        # arrays
        ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"],
         ["[]", "[1,2,3]", '["a"]']),
        ({"type": "array", "prefixItems": [INTEGER, {"type": "null"}], "items": False},
         ["[1,null]"], ["[1,2]", "[1,null,3]"]),
        ({"items": [{"type": "null"}], "additionalItems": False, "type": "array"}, ["[null]"],
         ["[1]", "[null,1]"]),
        # listed values
        ({"enum": ["a", 1, None, {"b": 2}]}, ['"a"', "1", "null", '{"b":2}'], ['"b"', "2"]),
        ({"const": "a"}, ['"a"'], ['"b"']),
        # combinations
        ({"anyOf": [{"type": "string"}, INTEGER]}, ["4", '"a"'], ["null"]),
        ({"oneOf": [{"type": "string"}, INTEGER]}, ["4", '"a"'], ["null"]),
        ({"oneOf": [HAS_A, HAS_B]}, ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":1}']),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "minimum": 3}}}, ["3"], ["2"]),
        (NODE, ["{}", '{"next":{"next":{}}}'], ['{"next":1}']),
        # An object stays open where another schema adds properties to it.
        ({"allOf": [of_a(INTEGER), {"properties": {"b": INTEGER}}]}, ['{"a":1,"b":2}'],
         ['{"a":"x"}']),
        # the whole schema
        (True, ["1", "[]", '"a"'], ["x"]),
        ({"title": "t", "description": "d", "default": 1, "examples": [2], "x-own": 3,
          "type": "null"}, ["null"], ["1"]),
        # white space between tokens: a space, or an indented line
        ({"type": "object"}, ['{"a": 1}', '{\n  "a": [\n\t1\n  ]\n}'], ['{  "a": 1}']),
    ],
)  # fmt: skip
def test_schema_allows_only_fitting_values(
    schema: Any, allowed: list[str], forbidden: list[str]
) -> None:
    assert [text for text in allowed if not allows(schema, text)] == []
    assert [text for text in forbidden if allows(schema, text)] == []


@pytest.mark.parametrize("keyword", REFUSED_KEYWORDS)
def test_schema_refuses_keywords_by_path(keyword: str) -> None:
    value = {"a": ["b"]} if keyword == "dependentRequired" else {}
    value = {"a": {}} if keyword == "dependentSchemas" else value
    value = True if keyword == "uniqueItems" else value
    cause = refusal(of_a({"type": "array", "items": {keyword: value}}))
    assert cause == f"properties.a.items.{keyword} cannot be enforced"


def test_schema_allows_property_named_like_keyword() -> None:
    assert allows({"type": "object", "properties": {"not": INTEGER}}, '{"not":1}')


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        (None, "the schema must be an object or a boolean"),
        ([], "the schema must be an object or a boolean"),
        (False, "the schema is false: no value fits"),
        ({"type": "flop"}, "Invalid type: flop"),
        (of_a(7), "schema must be an object or boolean"),
        (of_a({"minLength": "a"}), "Expected positive integer for 'minLength'"),
        ({"required": "a"}, "Expected array for 'required'"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        (of_a({"$ref": "#/$defs/b"}), "Pointer '/$defs/b' does not exist"),
        ({"$ref": "https://a.b/c"}, "https://a.b/c"),
        ({"oneOf": [{"type": "number"}, INTEGER]}, "oneOf"),
        ({"minLength": 3, "maxLength": 2, "type": "string"}, "Unsatisfiable schema"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"type": "object", "minProperties": 2}, "minProperties cannot be enforced above"),
        ({"enum": [{"b": [2**53 + 1]}]}, "enum has a number beyond 2^53"),
        ({"type": "number", "minimum": 1e300}, "minimum has a number beyond 2^53"),
        (of_a({"const": -(2**60)}), "properties.a.const has a number beyond 2^53"),
        ({"enum": ["\ud800"]}, "enum.0 has half of a surrogate pair"),
    ],
)
def test_schema_refusal_names_the_cause(schema: Any, cause: str) -> None:
    assert cause in refusal(schema)


@pytest.mark.parametrize("text", ['{"type":', "", "nan,", '{"minimum": NaN}', "9" * 5000])
def test_schema_that_is_not_json_is_refused(text: str) -> None:
    assert "the schema is not JSON" in refusal_of_text(text)


@pytest.mark.parametrize("depth", [2 * MAX_DEPTH + 1, 1_000, 30_000])
def test_schema_that_is_too_deep_is_refused(depth: int) -> None:
    text = '{"items":' * depth + "{}" + "}" * depth
    assert "more than 64 levels deep" in refusal_of_text(text)


def test_schema_cannot_switch_enforcement_off() -> None:
    schema = {"x-guidance": {"lenient": True}, "uniqueItems": True, "type": "array"}
    assert refusal(schema) == "uniqueItems cannot be enforced"


def test_discriminator_requires_its_property() -> None:
    def branch(tag: str, name: str) -> dict[str, Any]:
        # Pydantic's schema of Literal[tag] = tag.
        return of_a({}, properties={"kind": {"const": tag, "default": tag}, name: INTEGER})

    union = {
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "$defs": {"A": branch("a", "x"), "B": branch("b", "y")},
        "discriminator": {"propertyName": "kind"},
    }
    assert allows(union, '{"kind":"a","x":1}')
    assert allows(union, '{"kind":"b"}')
    assert not allows(union, '{"x":1}')
    assert not allows(union, '{"kind":"a","y":1}')


def with_a(schema: Any, **definitions: Any) -> dict[str, Any]:
    return {**schema, "$defs": {"A": HAS_A, **definitions}}


REF_A = {"$ref": "#/$defs/A"}
UNION = {"anyOf": [REF_A, {"type": "null"}]}
PAIR = {"properties": {"x": {"$ref": "#/$defs/P"}, "y": REF_A}}


@pytest.mark.parametrize(
    "schema",
    [
        with_a({"allOf": [REF_A, HAS_B]}),
        with_a({**HAS_B, **REF_A}),
        with_a({**HAS_B, "anyOf": [REF_A]}),
        with_a({**REF_A, "patternProperties": {"^b$": INTEGER}, "required": ["b"]}),
        {"allOf": [{"$ref": "#/definitions/A"}, HAS_B], "definitions": {"A": HAS_A}},
        {"allOf": [{"$ref": "#/$defs/a~1%20b"}, HAS_B], "$defs": {"a/ b": HAS_A}},
        {"allOf": [{"$ref": "#/$defs/A/anyOf/0"}, HAS_B], "$defs": {"A": {"anyOf": [HAS_A]}}},
        # through other schemas
        with_a({"allOf": [{"$ref": "#/$defs/U"}, HAS_B]}, U=UNION),
        with_a({"$ref": "#/$defs/B", **HAS_B}, B={"$ref": "#/$defs/U"}, U=UNION),
        with_a({"allOf": [{"allOf": [REF_A]}, HAS_B]}),
        {"allOf": [{"anyOf": [HAS_A, {"type": "null"}]}, HAS_B]},
    ],
)
def test_object_stays_open_if_another_schema_adds_properties(schema: Any) -> None:
    assert allows(schema, '{"a":1,"b":2}') or allows(schema, '{"b":2,"a":1}')
    assert not allows(schema, '{"a":1}') and not allows(schema, '{"b":2}')


@pytest.mark.parametrize(
    "schema",
    [
        with_a(REF_A),
        with_a({**REF_A, "description": "d", "default": {"a": 1}, "required": ["a"]}),
        with_a({"anyOf": [REF_A, {"type": "null"}]}),
        with_a({"$ref": "#/$defs/U"}, U=UNION),
        # Pydantic's schema of a field with a default
        with_a({"allOf": [REF_A], "default": {"a": 1}}),
        # properties are added to the enclosing object
        with_a({**REF_A, "description": "d"}, B={"allOf": [of_a(REF_A), HAS_B]}),
    ],
)
def test_object_is_closed_if_no_other_schema_adds_properties(schema: Any) -> None:
    assert allows(schema, '{"a":1}')
    assert not allows(schema, '{"a":1,"b":2}')


def test_definition_used_both_ways_stays_open() -> None:
    schema = with_a(PAIR, P={"allOf": [REF_A, HAS_B]})
    assert allows(schema, '{"x":{"a":1,"b":2},"y":{"a":1}}')
    assert allows(schema, '{"y":{"a":1,"c":2}}')
    assert not allows(schema, '{"z":1}')


def test_schema_refuses_reference_to_itself_and_to_nowhere() -> None:
    for pointer in ("#/allOf/0", "#/$defs/A", "#/allOf/7", "#/allOf/" + "9" * 5000, "#nowhere"):
        assert refusal({"allOf": [{"$ref": pointer}, HAS_B]})


AHEAD = {"type": "string", "pattern": "^(?!x)a"}


def test_schema_omits_branch_with_look_around() -> None:
    decimal = {"anyOf": [{"type": "number"}, AHEAD]}
    assert allows(decimal, "1") and not allows(decimal, '"a"')
    assert "look-around" in refusal({"anyOf": [AHEAD]})
    assert "look-around" in refusal({"oneOf": [{"type": "null"}, AHEAD]})
