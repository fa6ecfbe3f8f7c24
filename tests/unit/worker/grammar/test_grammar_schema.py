"""JSON schemas: which texts their grammar allows, and what is refused with which words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.worker.json_schema_support import TRIE
from worker.grammar.json_grammar import json_grammar
from worker.grammar.schema import MAX_DEPTH, REFUSED, NotEnforceable
from worker.grammar.vocabulary import token_matcher


def allows(schema: Any, text: str) -> bool:
    matcher = token_matcher(TRIE, json_grammar(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def refusal(schema: Any) -> str:
    with pytest.raises(NotEnforceable) as caught:
        json_grammar(json.dumps(schema))
    return str(caught.value)


def of_a(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, **more}


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        # strings: an escape sequence is one character, and no control character is written raw
        (
            {"type": "string", "minLength": 1, "maxLength": 4},
            ['"a"', '"\\n\\n\\"\\\\"', '"é😀"', '"\\u0001"', '"\\u0041\\u00e9\\uD7ff\\ufeff"'],
            ['""', '"\t"', '"abcde"', '"\\n\\n\\n\\n\\n"', '"\\u0041abcd"', '"\\a"', '"\\u004"'],
        ),
        (
            {"type": "string", "minLength": 2, "maxLength": 2},
            ['"\\ud83d\\ude00a"', '"\\/\\/"', '"\\uDBFF\\uDFFF\\b"', '"\\f\\r"'],
            ['"\\ud83d\\ude00"', '"\\ud83da"', '"\\ude00\\ud83d"', '"a\\udfff"',
             '"\\ud83d\\u0041"'],
        ),
        # beside a pattern or format: one spelling, and no way from a \\u to the wrong character
        (
            {"type": "string", "pattern": "^caf[^x]*$"},
            ['"café\\n\\""'],
            ['"caf\\u00e9"', '"caf\\u0019"', '"caf\\/"'],
        ),
        ({"pattern": "^[\\u0000-\\u001f]$"}, ['"\\u0019"', '"\\n"'], ['"a"', '"\\u0020"']),
        ({"pattern": "^\\u0019$"}, ['"\\u0019"'], ['"\\n"']),
        ({"type": "object", "minProperties": 1}, ['{"é/\\n":1}'], ['{"\\u00e9":1}', '{"\\/":1}']),
        ({"pattern": '^"x"$'}, ['"\\"x\\""'], ['""x""', '"x"']),
        ({"pattern": "^ab"}, ['"ab"', '"abc"'], ['"cab"', '"a"']),
        ({"pattern": "b$"}, ['"ab"', '"b"'], ['"ba"']),
        ({"pattern": "\n"}, ['"a\\nb"'], ['"ab"']),
        ({"pattern": "ab", "maxLength": 3}, ['"xab"', '"ab"'], ['"xxab"', '"abb']),
        ({"pattern": "^(é|\\\\)$"}, ['"é"', '"\\\\"'], ['"\\"']),
        ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-13-01"', '"2024-02-30"']),
        ({"format": "date"}, ['"0001-01-01"', '"1000-01-01"'], ['"0000-01-01"']),
        ({"format": "date-time"}, ['"0010-01-01T00:00:00Z"'], ['"0000-01-01T00:00:00Z"']),
        ({"format": "duration"}, ['"P3Y6M4DT12H30M5S"', '"P999999W"'], ['"P1234567Y"', '"P"']),
        ({"type": "string", "format": "of our own"}, ['"anything"'], ["1"]),
        # bounds beyond any output
        ({"type": "string", "maxLength": 2**53 - 1}, ['""', '"ab"'], ["1"]),
        ({"items": {"type": "null"}, "maxItems": 2**53 - 1}, ["[]", "[null,null]"], ["[1]"]),
        (of_a({}, maxProperties=2**53 - 1), ["{}", '{"a":1}'], ['{"b":1}']),
        ({"type": "object", "maxProperties": 2**40}, ["{}", '{"a":1,"b":1}'], ["[]"]),
        ({"type": "array", "items": {"type": "null"}, "minItems": 150_000}, [], ["[]", "[null]"]),
        # numbers
        ({"type": "integer"}, ["0", "-7", "123"], ["01", "1.0", "1e3"]),
        ({"type": "number"}, ["0.5", "-1e3", "7"], [".5", "1."]),
        ({"type": "integer", "maximum": 2**70}, [str(2**70)], [str(2**70 + 1)]),
        ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 1)], [str(2**53)]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.001", "12"], ["0", "0.0", "-1"]),
        ({"type": "number", "minimum": 0.5, "maximum": 1.25}, ["0.5", "1.25", "1"], ["1.26", "2"]),
        ({"type": "integer", "multipleOf": 3, "minimum": 4}, ["6", "300"], ["3", "7"]),
        ({"type": "integer", "minimum": -3, "maximum": -2}, ["-3", "-2"], ["-4", "-1", "0", "3"]),
        # objects: closed if they name properties, in the order of the schema
        (of_a({"type": "null"}), ["{}", '{"a":null}', '{"a": null}'], ['{"b":null}', '{"a":1}']),
        (
            of_a({"type": "null"}, additionalProperties={"type": "integer"}),
            ['{"a":null,"b":1}', '{"b":1}'],
            ['{"a":1}', '{"b":null}', '{"b":1,"a":1}'],
        ),
        (
            {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a", "z"]},
            ['{"a":1,"z":2}', '{"b":0,"a":1,"z":2}'],
            ['{"a":1}', '{"z":2,"a":1}', '{"b":1}'],
        ),
        (
            {"patternProperties": {"^x-": {"type": "integer"}}},
            ['{"x-a":1}', '{"x-":1}', "{}"],
            ['{"y":1}', '{"x-a":null}'],
        ),
        (
            {
                "properties": {"x-a": {"minimum": 5}},
                "patternProperties": {"^x-": {"type": "integer"}},
                "additionalProperties": {"type": "null"},
            },
            ['{"x-a":5,"x-b":1,"c":null}'],
            ['{"x-a":4}', '{"c":1}', '{"x-b":null}'],
        ),
        (
            {"type": "object", "propertyNames": {"maxLength": 2}},
            ['{"\\n\\"":1}', '{"ab":1}'],
            ['{"abc":1}'],
        ),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
            ['{"a":null,"b":null}', '{"b":null}'],
            ['{"c":null}'],
        ),
        (
            {"type": "object", "minProperties": 1, "maxProperties": 2},
            ['{"a":1}', '{"a":1,"b":1}'],
            ["{}", '{"a":1,"b":1,"c":1}'],
        ),
        (
            {"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "maxProperties": 2},
            ['{"a":1,"c":1}', '{"b":1,"c":1}'],
            ['{"a":1}', '{"a":1,"b":1,"c":1}'],
        ),
        (of_a({}, unevaluatedProperties=False), ['{"a":1}'], ['{"b":15}']),
        (
            {"allOf": [of_a({"type": "integer"})], "unevaluatedProperties": {"type": "null"}},
            ['{"a":1,"b":null}'],
            ['{"a":1,"b":1}'],
        ),
        # arrays
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}},
            ["[]", "[null]", "[null, 1,2]"],
            ["[1]", "[null,null]"],
        ),
        ({"items": {"type": "null"}, "minItems": 2}, ["[null,null]"], ["[null]"]),
        ({"items": {"type": "null"}, "maxItems": 1}, ["[]", "[null]"], ["[null,null]"]),
        ({"items": False}, ["[]"], ["[1]"]),
        ({"contains": {"type": "integer"}}, ["[1]", '[1,"a"]'], ["[]", '["a"]']),
        (
            {"contains": {"const": 1}, "minContains": 2, "prefixItems": [{"type": "null"}]},
            ["[null,1,1]"],
            ["[null,1]"],
        ),
        ({"prefixItems": [{}], "unevaluatedItems": False}, ["[]", "[1]"], ["[1,2]"]),
        (
            {"items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
            ['["c","a"]', '["a","b","c"]'],
            ['["a","a"]', "[]"],
        ),
        (
            {"items": {"type": "integer", "minimum": 1, "maximum": 40}, "uniqueItems": True},
            ["[1,2,40]", "[]"],
            ["[2,1]", "[1,1]"],
        ),
        ({"items": {"type": "boolean"}, "uniqueItems": True}, ["[true,false]"], ["[true,true]"]),
        ({"uniqueItems": True, "maxItems": 1}, ['["a"]'], ['["a","b"]']),
        # values
        ({"enum": ["x\n", 1, [1, {"a": None}]]}, ['"x\\n"', '[1,{"a":null}]'], ["2"]),
        ({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"]),
        ({"enum": ["a", "abc"], "minLength": 2}, ['"abc"'], ['"a"']),
        ({"const": 2**70 + 1}, [str(2**70 + 1)], [str(2**70)]),
        # combinations
        (
            {"allOf": [of_a({"minimum": 1}), of_a({"maximum": 2}), {"required": ["a"]}]},
            ['{"a":1}', '{"a":2}'],
            ["{}", '{"a":3}', '{"a":0}', '{"a":1,"b":1}'],
        ),
        ({"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": {"type": "integer"}}}, ["3"], ["2"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}], "minimum": 3}, ["4", '"a"'], ["2"]),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["4", '"a"'], ["null"]),
        (NODE, ["{}", '{"next":{"next":{}}}'], ['{"next":1}']),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
         ["null", '{"a":{"a":null}}'], ["{}"]),
        ({"minLength": 2}, ['"ab"'], ["1"]),
        ({"items": [{"type": "null"}], "additionalItems": False}, ["[null]"], ["[1]", "[null,1]"]),
        # between tokens: a space, or an indented line
        ({"type": "object"}, ['{"a": 1}', '{\n  "a": [\n\t1\n  ]\n}'], ['{  "a": 1}', '{"a" : 1}']),
    ],
)  # fmt: skip
def test_json_grammar_allows_what_fits_the_schema(
    schema: Any, allowed: list[str], forbidden: list[str]
) -> None:
    assert [text for text in allowed if not allows(schema, text)] == []
    assert [text for text in forbidden if allows(schema, text)] == []


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_json_grammar_refuses_keywords_by_path(keyword: str) -> None:
    cause = refusal(of_a({"type": "array", "items": {keyword: {}}}))
    assert cause == f"properties.a.items.{keyword} cannot be enforced"


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        (of_a({"uniqueItems": True, "items": {"type": "string"}}), "properties.a.uniqueItems"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf cannot be enforced: a value"),
        ({"oneOf": [{"minLength": 3}, {"type": "integer"}]}, "oneOf cannot be enforced: a value"),
        (of_a({"multipleOf": 0.1}), "properties.a.multipleOf cannot be enforced unless"),
        (of_a({"maximum": 1e300}), "properties.a.maximum has more than 100 digits"),
        (of_a({"minLength": "a"}), "properties.a.minLength must be a number of at least 0"),
        (of_a({"minLength": 2**40}), "properties.a.minLength cannot be enforced above 1000000"),
        (of_a({"minItems": 2**40}), "properties.a.minItems cannot be enforced above 1000000"),
        (of_a({"minProperties": 2**40}), "properties.a.minProperties cannot be enforced above 1"),
        (
            of_a({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-16}, required=["a"]),
            "properties.a: no number of at most 15 digits fits",
        ),
        (
            {"exclusiveMinimum": 0, "exclusiveMaximum": 0},
            "the schema: no value of finite length fits",
        ),
        (None, "the schema must be an object or a boolean"),
        ([], "the schema must be an object or a boolean"),
        (of_a({}, patternProperties={"(?<n>a)": {}}), "cannot be enforced beside names"),
        (of_a(7), "properties.a must be an object or a boolean"),
        (of_a({"pattern": "(?=a)"}), "properties.a.pattern cannot be enforced: look-around"),
        (of_a({"$ref": "#/$defs/b"}), "properties.a.$ref leads nowhere: #/$defs/b"),
        (of_a({"$ref": "https://a.b/c"}), "properties.a.$ref leads out of the schema"),
        (of_a({"$id": "https://a.b/c"}), "properties.a.$id cannot be enforced"),
        ({"type": "object", "minProperties": 3}, "minProperties cannot be enforced: only one key"),
        ({"required": "a"}, "required must be a list of names"),
        ({"type": [{}]}, "type must be the name of a type"),
        ({"enum": ["\ud800"]}, "enum has half of a surrogate pair"),
        ({"contains": {}, "maxItems": 1, "prefixItems": [{}]}, "contains cannot be enforced"),
        ({"anyOf": [{"anyOf": [{"type": "null"}] * 300}]}, "more than 256 combinations"),
    ],
)
def test_json_grammar_refuses_with_path_and_keyword(schema: Any, cause: str) -> None:
    assert cause in refusal(schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (False, "the schema"),
        ({"enum": []}, "the schema"),
        ({"type": "integer", "enum": ["a"]}, "the schema"),
        (of_a({"minLength": 3, "maxLength": 2}, required=["a"]), "properties.a"),
        (of_a({"minimum": 3, "maximum": 2}, required=["a"]), "properties.a"),
        (of_a({"minItems": 3, "maxItems": 2}, required=["a"]), "properties.a"),
        (of_a({"pattern": "^a$", "minLength": 3}, required=["a"]), "properties.a"),
        (of_a(False, required=["a"]), "the schema"),
        ({**NODE, "required": ["next"]}, "properties.next"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "items"),
        (of_a({"allOf": [{"type": "string"}, {"type": "null"}]}, required=["a"]), "properties.a"),
        (
            {"allOf": [{"required": ["next"]}, {**NODE}]},
            "allOf",
        ),
    ],
)
def test_json_grammar_refuses_what_no_finite_text_fits(schema: Any, place: str) -> None:
    cause = refusal(schema)
    assert "no value of finite length fits" in cause
    assert cause.startswith(place) or place == "allOf"


NUMBERS = list(range(4000))


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": NUMBERS},
        {"type": "integer", "minimum": 0, "enum": NUMBERS},
        {"allOf": [{"enum": NUMBERS}], "maximum": 3999},
        {"$ref": "#/$defs/n", "$defs": {"n": {"enum": NUMBERS}}},
        {"oneOf": [{"enum": NUMBERS[:2000]}, {"enum": NUMBERS[2000:]}]},
        {"enum": NUMBERS, "unevaluatedItems": False},
    ],
)
def test_json_grammar_reads_large_enums_in_linear_time(schema: Any) -> None:
    text = json.dumps(schema)
    began = time.thread_time()
    json_grammar(text)
    # Comparing each value with each other one takes 9 s.
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"enum": [1, True, "1", [1]], "const": 1.0}, ["1"]),
        ({"enum": [0, False, 2], "anyOf": [{"const": 0}, {"minimum": 2}]}, ["0", "2", "false"]),
        ({"enum": [1, 2, 3], "oneOf": [{"maximum": 2}, {"minimum": 2}]}, ["1", "3"]),
        ({"enum": [{"a": 1}, {"b": 1}], "allOf": [of_a({})], "unevaluatedProperties": False},
         ['{"a":1}']),
        ({"enum": ["a", "bb"], "not_a_keyword": 1, "allOf": [{"minLength": 2}]}, ['"bb"']),
    ],
)  # fmt: skip
def test_json_grammar_keeps_listed_values_that_fit(schema: Any, allowed: list[str]) -> None:
    texts = ["0", "1", "2", "3", "true", "false", '"1"', "[1]", '{"a":1}', '{"b":1}', '"a"', '"bb"']
    assert [text for text in texts if allows(schema, text)] == allowed


def tagged(*values: Any, **more: Any) -> dict[str, Any]:
    described = {"type": "object", "properties": {"tag": {"enum": [*values]}}}
    return described | {"required": ["tag"]} | more


@pytest.mark.parametrize(
    ("one", "other", "is_apart"),
    [
        (tagged("cat"), tagged("dog", "wolf"), True),
        ({"$ref": "#/$defs/a~1b"}, tagged("dog"), True),
        (tagged("cat"), tagged("dog", "cat"), False),
        (tagged(1), tagged(1.0), False),
        (tagged("cat"), tagged(1), True),
        # An object without its tag may be either.
        (tagged("cat", required=[]), tagged("dog"), False),
        (tagged("cat", required=[]), tagged("dog", required=[]), False),
        (tagged("cat"), {"type": "object"}, False),
        (tagged("cat", type=["object", "null"]), tagged("dog", type=["object", "null"]), False),
        # Objects with other required names: what names its properties has no others.
        (of_a({}, required=["a"]), {"properties": {"b": {}}, "required": ["b"]}, True),
        (
            of_a({}, required=["a"]),
            {"type": "object", "properties": {"b": {}}, "required": ["b"]},
            True,
        ),
        ({"type": "integer", "maximum": 1}, {"type": "number", "minimum": 2}, True),
        ({"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}, True),
        ({"const": "a"}, {"type": "string", "minLength": 2}, True),
        ({"const": "ab"}, {"type": "string", "minLength": 2}, False),
    ],
)
def test_json_grammar_needs_one_of_with_disjoint_branches(
    one: Any, other: Any, is_apart: bool
) -> None:
    schema = {"oneOf": [one, other], "$defs": {"a/b": tagged("cat")}}
    if is_apart:
        json_grammar(json.dumps(schema))
    else:
        assert "a value may fit branches 0 and 1" in refusal(schema)


INTEGER = {"type": "integer"}
HAS_A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
HAS_B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
HAS_BOTH = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}


@pytest.mark.parametrize(
    "schema",
    [
        {**HAS_BOTH, "oneOf": [HAS_A, HAS_B]},
        {"required": ["b"], "oneOf": [HAS_A, HAS_B]},
        {"additionalProperties": INTEGER, "oneOf": [HAS_A, HAS_B]},
        {"unevaluatedProperties": INTEGER, "oneOf": [HAS_A, HAS_B]},
        {"patternProperties": {"^[ab]$": INTEGER}, "oneOf": [HAS_A, HAS_B]},
        {"allOf": [HAS_BOTH, {"oneOf": [HAS_A, HAS_B]}]},
        {"oneOf": [HAS_A, HAS_B], "anyOf": [HAS_BOTH]},
        {"oneOf": [HAS_A, HAS_B], "$ref": "#/$defs/both", "$defs": {"both": HAS_BOTH}},
        {"properties": {"p": {"oneOf": [HAS_A, HAS_B]}},
         "allOf": [{"properties": {"p": HAS_BOTH}}]},
        # Two items fit the second branch: its prefixItems are optional.
        {"oneOf": [{"items": {}, "minItems": 2, "maxItems": 2},
                   {"prefixItems": [{}, {}], "contains": {}}]},
    ],
)  # fmt: skip
def test_json_grammar_compares_branches_with_what_is_around(schema: Any) -> None:
    assert "oneOf cannot be enforced: a value may fit branches 0 and 1" in refusal(schema)


def test_json_grammar_enforces_one_of_with_its_parent() -> None:
    both = {"kind": {"enum": ["a", "b"]}, "x": INTEGER}
    schema = {
        "properties": both,
        "required": ["kind"],
        "oneOf": [
            {"properties": {"kind": {"const": "a"}}},
            {"properties": {"kind": {"const": "b"}}},
        ],
    }
    assert allows(schema, '{"kind":"a","x":1}')
    assert not allows(schema, '{"x":1}')
    included_twice = {
        "allOf": [{"$ref": "#/$defs/u"}] * 2,
        "$defs": {"u": {"oneOf": [HAS_A, HAS_B]}},
    }
    assert allows(included_twice, '{"a":1}')
    assert not allows(included_twice, '{"a":1,"b":1}')


def test_json_grammar_writes_the_tag_of_a_discriminated_union() -> None:
    def branch(tag: str, name: str) -> dict[str, Any]:
        # As Pydantic writes Literal[tag] = tag.
        return of_a({}, properties={"kind": {"const": tag, "default": tag}, name: INTEGER})

    union = {
        "oneOf": [branch("a", "x"), branch("b", "y")],
        "discriminator": {"propertyName": "kind"},
    }
    assert allows(union, '{"kind":"a","x":1}')
    assert allows(union, '{"kind":"b"}')
    assert not allows(union, '{"x":1}')
    assert not allows(union, '{"kind":"a","y":1}')
    del union["discriminator"]
    assert "oneOf cannot be enforced" in refusal(union)


def test_json_grammar_compares_a_union_without_its_tag() -> None:
    # The discriminator of a branch is an annotation: {} fits the second branch as well.
    tagged_union = {
        "oneOf": [tagged("a", required=[]), {"type": "null"}],
        "discriminator": {"propertyName": "tag"},
    }
    assert "oneOf cannot be enforced" in refusal({"oneOf": [{"const": {}}, tagged_union]})
    assert "oneOf cannot be enforced" in refusal(
        {"oneOf": [of_a(INTEGER, required=["a"]), tagged_union]}
    )


AHEAD = {"type": "string", "pattern": "^(?!x)a"}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"anyOf": [{"type": "number"}, AHEAD]}, ["1"], ['"a"', "null"]),
        ({"anyOf": [AHEAD, {"type": "null"}]}, ["null"], ['"a"']),
        ({"anyOf": [{"not": {}}, {"type": "null"}]}, ["null"], ["1"]),
        (
            {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": AHEAD}},
            ["null"],
            ['"a"'],
        ),
        ({"anyOf": [{"anyOf": [AHEAD, {"not": {}}]}, {"type": "null"}]}, ["null"], ['"a"']),
    ],
)
def test_json_grammar_leaves_out_branches_of_any_of_that_it_cannot_enforce(
    schema: Any, allowed: list[str], forbidden: list[str]
) -> None:
    assert [text for text in allowed if not allows(schema, text)] == []
    assert [text for text in forbidden if allows(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ({"anyOf": [AHEAD]}, "anyOf.0.pattern cannot be enforced: look-around"),
        ({"anyOf": [AHEAD, {"not": {}}]}, "cannot be enforced"),
        ({"anyOf": [AHEAD, False]}, "anyOf.0.pattern cannot be enforced"),
        ({"anyOf": [{"type": "null"}], "oneOf": [AHEAD, {}]}, "oneOf.0.pattern cannot"),
        # More fits the first branch of oneOf than would be written for it.
        ({"oneOf": [{"anyOf": [AHEAD, {"type": "null"}]}, {"type": "integer"}]}, "oneOf cannot be"),
        ({"anyOf": [{"minLength": "a"}, {"type": "null"}]}, "anyOf.0.minLength must be a number"),
        ({"anyOf": [{"not": {}}, {"type": "null"}], "$ref": "#/anyOf/0"}, "anyOf.0.not cannot be"),
    ],
)  # fmt: skip
def test_json_grammar_refuses_any_of_without_an_enforceable_branch(schema: Any, cause: str) -> None:
    assert cause in refusal(schema)


@pytest.mark.parametrize("text", ['{"type":', "", "nan,", '{"minimum": NaN}', '{"maximum": 1e999}'])
def test_json_grammar_refuses_what_is_not_json(text: str) -> None:
    with pytest.raises(NotEnforceable, match="the schema is not JSON"):
        json_grammar(text)


def test_json_grammar_refuses_long_chains_of_references() -> None:
    links = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(1500)}
    assert "nested too deeply" in refusal({"$ref": "#/$defs/d0", "$defs": {**links, "d1500": {}}})


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ('{"minimum": N}', "properties.a.minimum has more than 100 digits"),
        ('{"enum": [1, N]}', "properties.a.enum has more than 4300 digits"),
        ('{"const": {"b": [N]}}', "properties.a.const has more than 4300 digits"),
    ],
)
def test_json_grammar_refuses_numbers_of_too_many_digits(value: str, cause: str, sign: str) -> None:
    number = sign + "9" * 5000
    with pytest.raises(NotEnforceable) as caught:
        json_grammar('{"properties": {"a": VALUE}}'.replace("VALUE", value.replace("N", number)))
    assert str(caught.value) == cause


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1_000, 30_000])
def test_json_grammar_refuses_deep_schemas(depth: int) -> None:
    with pytest.raises(NotEnforceable, match="more than 64 levels deep"):
        json_grammar('{"items":' * depth + "{}" + "}" * depth)
