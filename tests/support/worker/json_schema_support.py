"""Random schemas over the enforced keywords of JSON Schema, and random outputs for them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import llguidance
import numpy as np
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.exceptions import Unresolvable

from worker.grammar.grammar_process import Refused, compile_grammar
from worker.grammar.json_schema import NotEnforceable
from worker.grammar.vocabulary import token_trie

Json = Any

_TEXTS = [b'":', b'", "', b"[1,", b"{}", b"null", b"true", b'"a"', b"\\n", b'\\"', b"12", b"-0.5"]
#: All bytes, and some tokens of several bytes.
TRIE = token_trie([bytes([byte]) for byte in range(256)] + _TEXTS)
TOKENS = [bytes([byte]) for byte in range(256)] + _TEXTS
END = len(TOKENS)
_NAMES = ["a", "b", "x-a", "é", 'q"', "n\nm", "not"]
_PATTERNS = [
    *("^x-", "a", "^ab?$", "b$", '^"x"$', "[^a]", r"\d", r"^\w+$", r"^\S*$", "^(a|b){1,2}$", "."),
    *(r"\\", r"^[\s\S]{2}$", "é|^$", r"\W", r"^[^\W\d]", r"^\D{2,}$", "(^a|b$)", r"\/"),
]
_REFUSED_PATTERNS = ["(?=a)b", r"\bword", r"(a)\1", "(?i)a", "[", "a**"]
_VALUES: list[Json] = [
    *(None, True, False, 0, 1, -1, 1.0, 1.5, 2**53 + 1, "a", "b", "", 'q"', "n\nm", "é", "abc"),
    *([], [1], [1, 1], ["a", "b"], {}, {"a": 1}, {"a": "a", "b": [None]}),
]
_BOUNDS: list[Json] = [-5, -1, 0, 1, 2, 3, 10, 99, 0.5, -0.5, 1.25, 2**53, 2**63, 2**70, 1e300, 0.1]
_FORMATS = ["date", "time", "email", "uuid", "ipv4", "date-time", "unheard-of"]
_ANNOTATIONS: list[tuple[str, Json]] = [
    *(("title", "t"), ("description", "d"), ("default", 1), ("examples", [1]), ("$comment", "c")),
    *(
        ("deprecated", True),
        ("readOnly", True),
        ("writeOnly", False),
        ("contentEncoding", "base64"),
    ),
    *(("contentMediaType", "text/plain"), ("contentSchema", {}), ("x-own", 1)),
    *(("$anchor", "here"), ("$dynamicAnchor", "there"), ("additionalItems", False)),
]
_TYPES = ["null", "boolean", "object", "array", "number", "string", "integer"]
_SCALAR_KEYWORDS = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
}
_ANYWHERE = ("enum", "const", "allOf", "anyOf", "oneOf", "$ref")
REFUSED_KEYWORDS = (
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
)
ENFORCED_KEYWORDS = (
    "type",
    *_ANYWHERE,
    *(key for keys in _SCALAR_KEYWORDS.values() for key in keys),
)


def _with_ascii_classes(schema: Json) -> Json:
    """Return the schema for a validator that uses ``re``, with the ASCII classes of ECMA-262."""
    if isinstance(schema, list):
        return [_with_ascii_classes(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: _with_ascii_classes(part) for name, part in schema.items()}
    if isinstance(pattern := schema.get("pattern"), str):
        result["pattern"] = f"(?a){pattern}"
    if isinstance(by_pattern := result.get("patternProperties"), dict):
        result["patternProperties"] = {f"(?a){text}": part for text, part in by_pattern.items()}
    return result


class Schemas:
    """Source of random schemas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> Json:
        """Return a whole schema, with definitions that it may refer to."""
        root = self._schema(self._random.choice((1, 2, 2, 3)))
        if isinstance(root, dict) and self._random.random() < 0.6:
            names = ("A", "B")[: self._random.randint(1, 2)]
            root["$defs"] = {name: self._schema(1) for name in names}
            if self._random.random() < 0.3:
                root["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return root

    def _schema(self, depth: int) -> Json:
        chance = self._random
        if chance.random() < 0.05:
            return chance.random() < 0.7
        if depth <= 0 and chance.random() < 0.5:
            return {"type": chance.choice(_TYPES)}
        kind = chance.choice(("number", "string", "string", "object", "object", "array", "array"))
        schema: dict[str, Json] = {}
        if chance.random() < 0.75:
            name = "integer" if kind == "number" and chance.random() < 0.5 else kind
            schema["type"] = [name, chance.choice(_TYPES)] if chance.random() < 0.15 else name
        for keyword in chance.sample(_SCALAR_KEYWORDS[kind], chance.randint(0, 3)):
            schema[keyword] = self._value(keyword, depth)
        if chance.random() < 0.1:
            other = chance.choice(list(_SCALAR_KEYWORDS.values()))
            keyword = chance.choice(other)
            schema[keyword] = self._value(keyword, depth)
        if chance.random() < 0.25:
            keyword = chance.choice(_ANYWHERE)
            schema[keyword] = self._value(keyword, depth)
        if chance.random() < 0.2:
            schema.update([chance.choice(_ANNOTATIONS)])
        if chance.random() < 0.02:
            keyword = chance.choice(REFUSED_KEYWORDS)
            schema[keyword] = self._refused_value(keyword, depth)
        return schema

    def _schemas(self, depth: int, least: int = 1) -> list[Json]:
        return [self._schema(depth - 1) for _ in range(self._random.randint(least, 3))]

    def _value(self, keyword: str, depth: int) -> Json:
        chance = self._random
        match keyword:
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return chance.choice(_BOUNDS)
            case "multipleOf":
                return chance.choice((1, 2, 3, 5, 10, 2.0, 0.5))
            case "minLength" | "minItems" | "minProperties":
                return chance.choice((0, 1, 1, 2, 3))
            case "maxLength" | "maxItems" | "maxProperties":
                return chance.choice((0, 1, 2, 3, 5, 9))
            case "pattern":
                is_refused = chance.random() < 0.05
                return chance.choice(_REFUSED_PATTERNS if is_refused else _PATTERNS)
            case "format":
                return chance.choice(_FORMATS)
            case "properties":
                names = chance.sample(_NAMES, chance.randint(0, 3))
                return {name: self._schema(depth - 1) for name in names}
            case "patternProperties":
                return {
                    text: self._schema(depth - 1)
                    for text in chance.sample(_PATTERNS, chance.randint(1, 2))
                }
            case "required":
                return chance.sample(_NAMES, chance.randint(0, 2))
            case "prefixItems" | "allOf" | "anyOf" | "oneOf":
                return self._schemas(depth)
            case "enum":
                return chance.sample(_VALUES, chance.randint(1, 5))
            case "const":
                return chance.choice(_VALUES)
            case "$ref":
                return chance.choice(("#", "#/$defs/A", "#/$defs/A", "#/$defs/B"))
        return self._schema(depth - 1)

    def _refused_value(self, keyword: str, depth: int) -> Json:
        match keyword:
            case "dependentRequired":
                return {"a": ["b"]}
            case "dependentSchemas":
                return {"a": self._schema(depth - 1)}
            case "uniqueItems":
                return True
        return self._schema(depth - 1)


@dataclass
class Report:
    """Counts of checked schemas; ``causes`` of refusals, ``keywords`` of accepted schemas."""

    num_schemas: int = 0
    num_outputs: int = 0
    num_unfinished: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    keywords: Counter[str] = field(default_factory=Counter)

    @property
    def num_refused(self) -> int:
        return self.causes.total()


def check_schemas(seed: int, count: int, num_outputs: int = 2) -> Report:
    """Check that each of ``count`` schemas is refused, or that all its outputs fit it."""
    report, schemas = Report(), Schemas(seed)
    for at in range(count):
        schema = schemas.schema()
        report.num_schemas += 1
        try:
            grammar = compile_grammar("json_schema", [json.dumps(schema)], TRIE)
        except (NotEnforceable, Refused) as error:
            report.causes[str(error).split(":")[0][:120]] += 1
            continue
        report.keywords.update(set(keywords(schema)))
        if not _allowed(grammar.deep_copy()):
            report.causes["no text fits"] += 1
            continue
        validator = Draft202012Validator(_with_ascii_classes(schema), registry=Registry())
        for nth in range(num_outputs):
            text = output(grammar, seed=at * num_outputs + nth)
            if text is None:
                report.num_unfinished += 1
                continue
            value = json.loads(text.decode())
            try:
                error = next(validator.iter_errors(value), None)
            except (Unresolvable, RecursionError, re.error):
                # The validator cannot judge the value: an unused definition has a dangling or
                # cyclic reference, or Python rejects a pattern.
                break
            assert error is None, f"{json.dumps(schema)} allowed {text!r}: {error.message}"
            report.num_outputs += 1
    return report


def keywords(schema: Json) -> Iterator[str]:
    """Yield the keywords of a schema and its subschemas."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield keyword
        if keyword in ("properties", "patternProperties", "$defs"):
            for part in value.values():
                yield from keywords(part)
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            for part in value:
                yield from keywords(part)
        elif keyword not in ("enum", "const", "default", "examples"):
            yield from keywords(value)


def output(grammar: llguidance.LLMatcher, seed: int, max_tokens: int = 400) -> bytes | None:
    """Return a random text of ``grammar``, or None if it exceeds ``max_tokens``.

    Raises AssertionError if no token can follow an incomplete text.
    """
    matcher = grammar.deep_copy()
    chance, text = random.Random(seed), b""
    for step in range(max_tokens):
        if matcher.is_accepting() and (chance.random() < 0.7 or step > 60):
            return text
        allowed = _allowed(matcher)
        assert not matcher.is_error(), f"{matcher.get_error()} after {text!r}"
        if not allowed:
            assert matcher.is_accepting(), f"nothing can follow {text!r}"
            return text
        token = _chosen(allowed, chance, is_late=step > 40)
        assert matcher.consume_token(token)
        text += TOKENS[token]
    return None


def _allowed(matcher: llguidance.LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return [int(token) for token in bits.nonzero()[0] if token < END]


#: Characters that lead to the end, by preference.
_CLOSING = [ord(character) for character in ']}":,0123456789nftea']


def _chosen(allowed: list[int], chance: random.Random, is_late: bool) -> int:
    if is_late or chance.random() < 0.4:
        closing = [token for token in _CLOSING if token in allowed]
        if closing:
            return closing[0] if is_late and chance.random() < 0.8 else chance.choice(closing)
    return chance.choice(allowed)
