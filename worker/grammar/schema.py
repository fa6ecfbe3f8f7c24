"""JSON schemas, resolved to the shapes of the values that they allow. Pure.

A schema of draft 2020-12 becomes nodes. A node is a conjunction of subschemas, and has one shape
for each combination of their alternatives (`anyOf`, `oneOf`), with `$ref` followed and `allOf`
merged. `json_grammar` writes shapes as grammar rules. Each keyword is enforced, refused by its path
and name, or an annotation; the table is in worker/README.md.

Shapes may be narrower than the schema, never wider:

- An object that declares properties has no others, unless additionalProperties or
  unevaluatedProperties allows them: small models tend to invent keys without end.
- Keywords that concern one type alone stand for that type where no type is named.
- The items that `contains` asks for come first, behind those of prefixItems.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import combinations, product
from typing import Any, NoReturn
from urllib.parse import unquote

import jsonschema
from referencing import Registry

from worker.grammar import patterns
from worker.grammar.formats import FORMATS
from worker.grammar.numbers import MAX_BOUND_DIGITS, Range

Json = Any
Path = tuple[str, ...]
#: Schema objects, all of which must hold. None: no value fits.
Conjunction = tuple[dict[str, Json], ...] | None

MAX_DEPTH = 64
_MAX_ALTERNATIVES = 256
_MAX_PATTERNS = 4
_MAX_NODES = 20_000
_MAX_FINITE = 64
#: Digits of an integer that Python reads and writes.
_MAX_DIGITS = 4300
_HUGE: int = 10**_MAX_DIGITS
#: Upper bounds on a length or a number of items or properties are lowered to this, which narrows
#: the schema; larger lower bounds are refused.
MAX_COUNT = 1_000_000

TYPES = frozenset({"null", "boolean", "string", "number", "object", "array"})
_BY_TYPE: Mapping[str, frozenset[str]] = {
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
        | {"uniqueItems", "unevaluatedItems"}
    ),
}
REFUSED = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"$dynamicRef", "$recursiveRef", "$recursiveAnchor", "maxContains"}
)


class NotEnforceable(ValueError):
    """A schema to which no output can be kept, with the path and the keyword."""


class Unsupported(NotEnforceable):
    """A valid keyword that cannot be enforced."""


# the shapes of values


@dataclass(frozen=True, slots=True)
class Text:
    """Strings of so many characters in which every pattern is found."""

    least: int = 0
    most: int | None = None
    patterns: tuple[patterns.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that match some patterns and not others, have no name out of ``names``, and are one of
    ``texts``."""

    found: tuple[patterns.Node, ...]
    not_found: tuple[patterns.Node, ...]
    texts: tuple[Text, ...]


@dataclass(slots=True)
class Members:
    """An object's members: ``named`` in this order, and ``others``, whose keys are none of
    ``names``. ``required`` are the names that the schema itself requires."""

    named: list[tuple[str, Conjunction, bool]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    others: list[tuple[Keys, Conjunction]] = field(default_factory=list)
    required: frozenset[str] = frozenset()
    least: int = 0
    most: int | None = None


@dataclass(slots=True)
class Items:
    """An array's items: those at the front, and all behind them. ``schema_least`` is the number of
    items that the schema itself requires; ``least``, that the grammar writes, may be larger."""

    front: list[Conjunction] = field(default_factory=list)
    rest: Conjunction = ()
    least: int = 0
    schema_least: int = 0
    most: int | None = None
    are_unique: bool = False
    path: Path = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The ``chosen`` branch of the `oneOf` of the schema at ``path``: a value that is written for
    it must not fit any other of ``branches``."""

    path: Path
    branches: list[Json]
    chosen: int


@dataclass(slots=True)
class Shape:
    """The values of some types, or ``values`` alone. ``allowed`` are the types that the schema
    itself allows, which may be more."""

    types: frozenset[str]
    allowed: frozenset[str] = TYPES
    values: list[Json] | None = None
    has_integers_only: bool = False
    numbers: Range = field(default_factory=Range)
    divisors: list[tuple[Path, int]] = field(default_factory=list)
    text: Text = field(default_factory=Text)
    members: Members = field(default_factory=Members)
    items: Items = field(default_factory=Items)
    choices: tuple[Choice, ...] = ()


# the keywords' values


def _is_count(value: Json) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return not isinstance(value, bool) and is_whole and value >= 0


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: Json) -> bool:
    return isinstance(value, bool | dict)


def _are_schemas(value: Json) -> bool:
    return isinstance(value, list) and bool(value)


def _are_schemas_by_name(value: Json) -> bool:
    return isinstance(value, dict)


def _is_type(value: Json) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(
        isinstance(name, str) and (name in TYPES or name == "integer") for name in names
    )


def _are_names(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_EXPECTED: Mapping[str, tuple[Callable[[Json], bool], str]] = {
    **dict.fromkeys(
        (
            "minLength",
            "maxLength",
            "minItems",
            "maxItems",
            "minProperties",
            "maxProperties",
            "minContains",
            "maxContains",
        ),
        (_is_count, "a number of at least 0 without a fraction"),
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number")
    ),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(
        (
            "additionalProperties",
            "propertyNames",
            "contains",
            "items",
            "unevaluatedProperties",
            "unevaluatedItems",
        ),
        (_is_schema, "a schema"),
    ),
    **dict.fromkeys(
        ("allOf", "anyOf", "oneOf", "prefixItems"), (_are_schemas, "a list of schemas")
    ),
    **dict.fromkeys(
        ("properties", "patternProperties", "$defs", "definitions"),
        (_are_schemas_by_name, "an object of schemas"),
    ),
    "type": (_is_type, "the name of a type or a list of such names"),
    "required": (_are_names, "a list of names"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "pattern": (lambda value: isinstance(value, str), "a regular expression"),
    "format": (lambda value: isinstance(value, str), "the name of a format"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "$ref": (lambda value: isinstance(value, str), "a reference"),
}


def parse(text: str) -> Json:
    """Return the JSON value of a schema's ``text``. Raises NotEnforceable."""
    try:
        return json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_bounded
        )
    except RecursionError:
        raise NotEnforceable(f"the schema is more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise NotEnforceable(f"the schema is not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _bounded(text: str) -> int:
    """Return the integer ``text``; one with more digits than Python reads becomes the nearest one
    that Python cannot write, which keywords refuse by their path."""
    if len(text.removeprefix("-")) <= _MAX_DIGITS:
        return int(text)
    return -_HUGE if text.startswith("-") else _HUGE


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:40]} is beyond the range of a double")
    return number


def _refuse(path: Path, keyword: str, cause: str) -> NoReturn:
    place = ".".join((*path, keyword))
    raise NotEnforceable(f"{place[-200:]} {cause}")


def _unsupported(path: Path, keyword: str, cause: str = "") -> NoReturn:
    place = ".".join((*path, keyword))
    raise Unsupported(f"{place[-200:]} cannot be enforced{cause}")


def _refuse_combinations(path: Path) -> NoReturn:
    place = ".".join(path) or "the schema"
    cause = f"has more than {_MAX_ALTERNATIVES} combinations of alternatives"
    raise NotEnforceable(f"{place[-200:]} {cause}")


def _least(schema: dict[str, Json], keyword: str, path: Path) -> int:
    """Return the lower bound at ``keyword``, 0 if there is none. Raises NotEnforceable."""
    if (least := schema.get(keyword, 0)) > MAX_COUNT:
        _unsupported(path, keyword, f" above {MAX_COUNT}")
    return int(least)


def _most(schemas: Iterable[dict[str, Json]], keyword: str) -> int | None:
    """Return the least upper bound at ``keyword``, at most MAX_COUNT; None if there is none."""
    mosts = [int(schema[keyword]) for schema in schemas if keyword in schema]
    return min(*mosts, MAX_COUNT) if mosts else None


# resolution


@dataclass(frozen=True, slots=True)
class Participant:
    """A schema that takes part in a conjunction. ``subtree`` is it and what it includes in place
    (by `$ref`, `allOf` and the chosen branches). ``choice`` is the branch of its `oneOf`."""

    schema: dict[str, Json]
    subtree: tuple[dict[str, Json], ...]
    choice: Choice | None = None


@dataclass(frozen=True, slots=True)
class _Check:
    """Keywords of a schema by how a value is checked: ``keys`` of the values that it lists (None:
    it lists none), keywords that include schemas in place, and the ``rest``."""

    keys: frozenset[object] | None
    included: dict[str, Json]
    rest: dict[str, Json]


Alternative = tuple[Participant, ...]


class Document:
    """A schema, whose nodes are resolved when they are asked for."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._paths: dict[int, Path] = {}
        self._alternatives: dict[int, list[Alternative]] = {}
        self._in_progress: set[int] = set()
        self._shapes: dict[tuple[int, ...], list[Shape]] = {}
        #: schemas and nodes without all branches of their `anyOf`
        self._narrowed: set[int | tuple[int, ...]] = set()
        self._checks: dict[int, _Check] = {}
        self.root = self._conjunction([self._visited(root, ())])
        self._validator = jsonschema.Draft202012Validator(root, registry=Registry())

    def shapes(self, node: Conjunction) -> list[Shape]:
        """Return the shapes of ``node``, of which a value has to have one."""
        if node is None:
            return []
        key = tuple(map(id, node))
        if key not in self._shapes:
            if len(self._shapes) >= _MAX_NODES:
                raise NotEnforceable("the schema has too many combinations of subschemas")
            self._shapes[key] = self._resolved(node, key)
        return self._shapes[key]

    def _resolved(self, node: Sequence[dict[str, Json]], key: tuple[int, ...]) -> list[Shape]:
        """Return the shapes of ``node``, without the branches of an `anyOf` that cannot be enforced
        where another one can."""
        shapes: list[Shape] = []
        #: by the chosen branches of each `oneOf`
        supported: set[tuple[tuple[int, int], ...]] = set()
        unsupported: dict[tuple[tuple[int, int], ...], Unsupported] = {}
        for parts in self._product(map(self._flattened, node), ()):
            if not _agree(parts):
                continue
            if not self._narrowed.isdisjoint(id(part.schema) for part in parts):
                self._narrowed.add(key)
            chosen = tuple((id(part.schema), part.choice.chosen) for part in parts if part.choice)
            try:
                shape = self._shape(_distinct(parts))
            except Unsupported as error:
                unsupported.setdefault(chosen, error)
                self._narrowed.add(key)
            else:
                if shape is not None:
                    shapes.append(shape)
                    supported.add(chosen)
        for chosen, cause in unsupported.items():
            if chosen not in supported:
                raise cause
        return shapes

    def check_exclusive(self, shape: Shape) -> None:
        """Raise NotEnforceable if a value that is written for ``shape`` may fit a branch of a
        `oneOf` beside the chosen one. ``shape`` has all keywords around the `oneOf` merged: a
        branch may be disjoint from another one only without what its parent declares."""
        for choice in shape.choices:
            for at, branch in enumerate(choice.branches):
                if at == choice.chosen or self._is_apart(shape, choice, branch):
                    continue
                one, other = sorted((at, choice.chosen))
                cause = f": a value may fit branches {one} and {other}"
                _unsupported(choice.path, "oneOf", cause)

    def finite_values(self, node: Conjunction) -> list[Json] | None:
        """Return all values of ``node``, None if they are too many."""
        values: list[Json] = []
        for shape in self.shapes(node):
            found = _finite_values(shape)
            if found is None or len(values) + len(found) > _MAX_FINITE:
                return None
            values += [value for value in found if _key(value) not in set(map(_key, values))]
        return values

    def place(self, node: Conjunction) -> str:
        """Return the path of the schema that a message about ``node`` begins with."""
        paths = [".".join(self._path(schema)) for schema in node or ()]
        return f"{paths[-1][-200:]}:" if paths and paths[-1] else "the schema:"

    # schemas

    def _visited(self, schema: Json, path: Path) -> Json:
        """Return ``schema``, checked. Raises NotEnforceable."""
        if isinstance(schema, bool) or id(schema) in self._paths:
            return schema
        if len(path) > MAX_DEPTH:
            raise NotEnforceable(f"the schema is more than {MAX_DEPTH} levels deep")
        if not isinstance(schema, dict):
            place = ".".join(path) or "the schema"
            raise NotEnforceable(f"{place[-200:]} must be an object or a boolean")
        if isinstance(schema.get("items"), list):
            # Draft 7 wrote prefixItems so.
            if "prefixItems" in schema:
                _refuse(path, "items", "must be a schema beside prefixItems")
            schema["prefixItems"] = schema.pop("items")
            schema["items"] = schema.pop("additionalItems", True)
            if not schema["prefixItems"]:
                del schema["prefixItems"]
        for keyword, value in schema.items():
            if keyword in REFUSED:
                _unsupported(path, keyword)
            is_expected, words = _EXPECTED.get(keyword, (None, ""))
            if is_expected is not None and not is_expected(value):
                _refuse(path, keyword, f"must be {words}")
        if path and isinstance(schema.get("$id"), str):
            _unsupported(path, "$id", ": only the root may have one")
        self._paths[id(schema)] = path
        return schema

    def _path(self, schema: dict[str, Json]) -> Path:
        return self._paths[id(schema)]

    def _part(self, schema: dict[str, Json], keyword: str, name: str | int | None = None) -> Json:
        """Return the subschema at ``keyword``, or at ``name`` of what is there."""
        part = schema[keyword]
        if name is not None:
            part = part[name]
        step = keyword if name is None else f"{keyword}.{name}"
        return self._visited(part, (*self._path(schema), step))

    def _conjunction(self, schemas: Iterable[Json]) -> Conjunction:
        members: dict[int, dict[str, Json]] = {}
        for schema in schemas:
            if schema is False:
                return None
            if schema is not True and schema:
                members[id(schema)] = schema
        return tuple(members[key] for key in sorted(members))

    def _referred(self, schema: dict[str, Json]) -> Json:
        reference: str = schema["$ref"]
        base = self._root.get("$id") if isinstance(self._root, dict) else None
        document, _, pointer = reference.partition("#")
        if document and document != str(base).partition("#")[0]:
            _refuse(self._path(schema), "$ref", "leads out of the schema")
        if pointer and not pointer.startswith("/"):
            _refuse(self._path(schema), "$ref", "must be a JSON pointer behind #")
        found, names = self._root, unquote(pointer).split("/")[1:]
        try:
            for name in (name.replace("~1", "/").replace("~0", "~") for name in names):
                found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, TypeError, ValueError):
            _refuse(self._path(schema), "$ref", f"leads nowhere: {reference[:80]}")
        return self._visited(found, tuple(names) if len(names) <= MAX_DEPTH else ("$ref",))

    # alternatives

    def _flattened(self, schema: Json) -> list[Alternative]:
        """Return the combinations of schemas of which one must hold as a whole."""
        if schema is True or schema is False:
            return [()] if schema else []
        if id(schema) in self._alternatives:
            return self._alternatives[id(schema)]
        path = self._path(schema)
        if id(schema) in self._in_progress:
            place = ".".join(path) or "the schema"
            raise NotEnforceable(f"{place[-200:]} refers back to itself before any value")
        self._in_progress.add(id(schema))
        try:
            self._alternatives[id(schema)] = self._combinations(schema, path)
        finally:
            self._in_progress.discard(id(schema))
        return self._alternatives[id(schema)]

    def _combinations(self, schema: dict[str, Json], path: Path) -> list[Alternative]:
        choices = []
        if "$ref" in schema:
            choices.append(self._flattened(self._referred(schema)))
        for at in range(len(schema.get("allOf", ()))):
            choices.append(self._flattened(self._part(schema, "allOf", at)))
        if "anyOf" in schema:
            choices.append(self._any_of(schema))
        result = []
        for choice, alternatives in self._one_of(schema):
            for included in self._product([*choices, alternatives], path):
                subtree = (schema, *(part.schema for part in included))
                result.append((Participant(schema, subtree, choice), *included))
        if len(result) > _MAX_ALTERNATIVES:
            _refuse_combinations(path)
        return result

    def _any_of(self, schema: dict[str, Json]) -> list[Alternative]:
        """Return the alternatives of the `anyOf` of ``schema``, without the branches that cannot be
        enforced if another one can: what is written fits the others."""
        result: list[Alternative] = []
        unsupported: Unsupported | None = None
        for at in range(len(schema["anyOf"])):
            try:
                result += self._flattened(self._part(schema, "anyOf", at))
            except Unsupported as error:
                unsupported = unsupported or error
        if unsupported is not None:
            if not result:
                raise unsupported
            self._narrowed.add(id(schema))
        return result

    def _branches(self, schema: dict[str, Json], keyword: str) -> list[Json]:
        return [self._part(schema, keyword, at) for at in range(len(schema[keyword]))]

    def _one_of(self, schema: dict[str, Json]) -> Iterator[tuple[Choice | None, list[Alternative]]]:
        """Yield each branch of the `oneOf` of ``schema`` with its alternatives; without a `oneOf`,
        the alternative that adds nothing."""
        if "oneOf" not in schema:
            yield None, [()]
            return
        branches = self._branches(schema, "oneOf")
        for at, branch in enumerate(branches):
            yield Choice(self._path(schema), branches, at), self._flattened(branch)

    def _product(self, choices: Iterable[list[Alternative]], path: Path) -> list[Alternative]:
        result: list[Alternative] = [()]
        for alternatives in choices:
            if len(result) * len(alternatives) > _MAX_ALTERNATIVES:
                _refuse_combinations(path)
            result = [(*one, *other) for one, other in product(result, alternatives)]
        return result

    # shapes

    def _shape(self, parts: Alternative) -> Shape | None:
        """Return what fits all ``parts``, None if nothing does."""
        schemas = [part.schema for part in parts]
        allowed, has_integers_only = _allowed_types(schemas)
        types = allowed if allowed != TYPES else _implied_types(schemas)
        choices = tuple(part.choice for part in parts if part.choice is not None)
        shape = Shape(types, allowed, has_integers_only=has_integers_only, choices=choices)
        if any("enum" in schema or "const" in schema for schema in schemas):
            shape.values = self._values(schemas)
            return shape if shape.values else None
        if "number" in types:
            self._merge_numbers(shape, schemas)
        if "string" in types:
            shape.text = self._text(schemas)
        if "object" in types:
            shape.members = self._members(parts)
        if "array" in types:
            shape.items = self._items(parts)
        return shape

    def _values(self, schemas: Sequence[dict[str, Json]]) -> list[Json]:
        first = next(schema for schema in schemas if "enum" in schema or "const" in schema)
        keyword = "enum" if "enum" in first else "const"
        values = {_key(value): value for value in _listed(first, keyword)}.values()
        for value in values:
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                _refuse(self._path(first), keyword, "has half of a surrogate pair")
            except ValueError:
                _refuse(self._path(first), keyword, f"has more than {_MAX_DIGITS} digits")
        return [value for value in values if all(self._fits(value, each) for each in schemas)]

    def _fits(self, value: Json, schema: Json) -> bool:
        try:
            return self._is_valid(value, schema)
        except NotEnforceable:
            raise
        except Exception:
            place = ".".join(self._path(schema)) or "the schema"
            raise NotEnforceable(
                f"{place[-200:]} cannot be enforced beside enum, const or names"
            ) from None

    def _is_valid(self, value: Json, schema: Json) -> bool:
        """As ``_fits``. Listed values are looked up by key: the validator compares a value with
        each of them."""
        if isinstance(schema, bool):
            return schema
        if id(schema) not in self._paths:
            return bool(self._validator.evolve(schema=schema).is_valid(value))
        if id(schema) not in self._checks:
            self._checks[id(schema)] = _check_of(schema)
        check = self._checks[id(schema)]
        if check.keys is not None and _key(value) not in check.keys:
            return False
        if check.rest and not self._validator.evolve(schema=check.rest).is_valid(value):
            return False
        included = check.included
        if "$ref" in included and not self._is_valid(value, self._referred(schema)):
            return False
        return (
            all(self._is_valid(value, each) for each in included.get("allOf", ()))
            and any(self._is_valid(value, each) for each in included.get("anyOf", [True]))
            and sum(self._is_valid(value, each) for each in included.get("oneOf", [True])) == 1
        )

    def _merge_numbers(self, shape: Shape, schemas: Sequence[dict[str, Json]]) -> None:
        for schema in schemas:
            path = self._path(schema)
            for keyword, is_lower in _BOUNDS:
                if keyword not in schema:
                    continue
                bound, excludes = _exact(path, keyword, schema[keyword]), keyword[0] == "e"
                numbers = shape.numbers
                shape.numbers = (
                    numbers.above(bound, excludes) if is_lower else numbers.below(bound, excludes)
                )
            if "multipleOf" in schema:
                divisor = _exact(path, "multipleOf", schema["multipleOf"])
                if divisor.denominator != 1:
                    _unsupported(path, "multipleOf", " unless it is an integer")
                shape.divisors.append((path, int(divisor)))

    def _text(self, schemas: Sequence[dict[str, Json]]) -> Text:
        least = self._least(schemas, "minLength")
        found: dict[str, patterns.Node] = {}
        for schema in schemas:
            if "pattern" in schema:
                found[schema["pattern"]] = self._pattern(schema, "pattern", schema["pattern"])
            if "format" in schema and schema["format"] in FORMATS:
                found[schema["format"]] = FORMATS[schema["format"]]
        return Text(least, _most(schemas, "maxLength"), tuple(found.values()))

    def _least(self, schemas: Sequence[dict[str, Json]], keyword: str) -> int:
        """Return the greatest lower bound at ``keyword``, 0 if there is none."""
        return max((_least(each, keyword, self._path(each)) for each in schemas), default=0)

    def _pattern(self, schema: dict[str, Json], keyword: str, text: str) -> patterns.Node:
        try:
            text.encode()
            return patterns.searched(patterns.parse(text))
        except UnicodeEncodeError:
            _refuse(self._path(schema), keyword, "has half of a surrogate pair")
        except patterns.PatternError as error:
            _unsupported(self._path(schema), keyword, f": {error}")

    # objects

    def _members(self, parts: Alternative) -> Members:
        schemas = [part.schema for part in parts]
        required = dict.fromkeys(name for each in schemas for name in each.get("required", ()))
        declared = dict.fromkeys(name for each in schemas for name in each.get("properties", ()))
        found: dict[str, patterns.Node] = {}
        for schema in schemas:
            for text in schema.get("patternProperties", ()):
                found[text] = self._pattern(schema, "patternProperties", text)
        if len(found) > _MAX_PATTERNS:
            raise NotEnforceable(f"more than {_MAX_PATTERNS} patternProperties of one object")
        least, most = self._least(schemas, "minProperties"), _most(schemas, "maxProperties")
        members = Members(required=frozenset(required), least=least, most=most)
        required |= dict.fromkeys(tag for each in schemas for tag in _tags(each))
        names = dict.fromkeys([*declared, *required])
        says_more = any(
            {"additionalProperties", "unevaluatedProperties"} & each.keys() for each in schemas
        )
        is_closed = bool(declared or found) and not says_more
        if is_closed and not found and least > len(names):
            is_closed = False
        key_nodes = [
            self._part(each, "propertyNames") for each in schemas if "propertyNames" in each
        ]
        texts: tuple[Text, ...] = (Text(),)
        if key_nodes:
            shapes = [
                shape
                for shape in self.shapes(self._conjunction(key_nodes))
                if shape.values is not None or "string" in shape.types
            ]
            texts = tuple(shape.text for shape in shapes if shape.values is None)
            for shape in shapes:
                for value in shape.values or ():
                    if isinstance(value, str) and (value in names or not is_closed or found):
                        names.setdefault(value)
        for name in names:
            _check_encodable(name)
            node = self._member(parts, partial(_finds, name), name)
            is_unnamed = name not in declared and name not in required
            is_known = not is_closed or not is_unnamed or any(re.search(t, name) for t in found)
            if not is_known:
                continue
            if not all(self._fits(name, each) for each in key_nodes):
                node = None
            members.named.append((name, node, name in required))
        members.names = list(names)
        if not is_closed and texts and least > len(names) + 1:
            # Keys without a name may be written twice, and then count once.
            schema = max(schemas, key=lambda each: each.get("minProperties", 0))
            cause = ": only one key more than the named ones is sure to be new"
            _unsupported(self._path(schema), "minProperties", cause)
        for chosen in _subsets(list(found)):
            if (is_closed and not chosen) or not texts:
                continue
            node = self._member(parts, chosen.__contains__, None)
            if node is not None:
                rest = tuple(node for text, node in found.items() if text not in chosen)
                keys = Keys(tuple(found[text] for text in chosen), rest, texts)
                members.others.append((keys, node))
        return members

    def _member(
        self, parts: Alternative, matches: Callable[[str], bool], name: str | None
    ) -> Conjunction:
        """Return what the value at a key must fit; ``name`` None: none that is declared."""
        result: list[Json] = []
        for part in parts:
            schema = part.schema
            is_covered = False
            if name is not None and name in schema.get("properties", ()):
                result.append(self._part(schema, "properties", name))
                is_covered = True
            for text in schema.get("patternProperties", ()):
                if matches(text):
                    result.append(self._part(schema, "patternProperties", text))
                    is_covered = True
            if "additionalProperties" in schema and not is_covered:
                result.append(self._part(schema, "additionalProperties"))
            if "unevaluatedProperties" in schema and not any(
                _evaluates(each, name, matches) or (each is not schema and _UNEVALUATED in each)
                for each in part.subtree
            ):
                result.append(self._part(schema, "unevaluatedProperties"))
        return self._conjunction(result)

    # arrays

    def _items(self, parts: Alternative) -> Items:
        schemas = [part.schema for part in parts]
        least, most = self._least(schemas, "minItems"), _most(schemas, "maxItems")
        width = max((len(each.get("prefixItems", ())) for each in schemas), default=0)
        items = Items(least=least, schema_least=least, most=most)
        items.front = [self._item(parts, at) for at in range(width)]
        items.rest = self._item(parts, width)
        for each in schemas:
            if each.get("uniqueItems"):
                items.are_unique, items.path = True, self._path(each)
            count = int(each.get("minContains", 1)) if "contains" in each else 0
            if count > 1000:
                _unsupported(self._path(each), "minContains", " above 1000")
            if count:
                contained = self._part(each, "contains")
                rest = () if items.rest is None else items.rest
                node = None if items.rest is None else self._conjunction([*rest, contained])
                items.front += [node] * count
                items.schema_least = max(items.schema_least, count)
                items.least = max(items.least, len(items.front))
                if items.most is not None and items.most < items.least:
                    cause = ": no room behind prefixItems within maxItems"
                    _unsupported(self._path(each), "contains", cause)
        return items

    def _item(self, parts: Alternative, at: int) -> Conjunction:
        result: list[Json] = []
        for part in parts:
            schema = part.schema
            if at < len(schema.get("prefixItems", ())):
                result.append(self._part(schema, "prefixItems", at))
            elif "items" in schema:
                result.append(self._part(schema, "items"))
            if "unevaluatedItems" in schema and not any(
                at < len(each.get("prefixItems", ()))
                or "items" in each
                or (each is not schema and "unevaluatedItems" in each)
                for each in part.subtree
            ):
                result.append(self._part(schema, "unevaluatedItems"))
        return self._conjunction(result)

    # oneOf

    def _is_apart(self, written: Shape, choice: Choice, branch: Json) -> bool:
        """Whether no value that is written for ``written``, a shape of the chosen branch, fits
        ``branch``."""
        if written.values is not None:
            return not any(self._fits(value, branch) for value in written.values)
        chosen = choice.branches[choice.chosen]
        node = self._conjunction([branch])
        shapes = self.shapes(node)
        if node is not None and tuple(map(id, node)) in self._narrowed:
            return False
        return all(self._shapes_are_apart(written, shape, chosen) for shape in shapes)

    def _shapes_are_apart(self, written: Shape, other: Shape, chosen: Json) -> bool:
        if other.values is not None:
            return not any(self._fits(value, chosen) for value in other.values)
        common = written.types & other.allowed
        return common <= other.types and all(
            self._are_apart_in(kind, written, other) for kind in common
        )

    def _are_apart_in(self, kind: str, written: Shape, other: Shape) -> bool:
        match kind:
            case "number":
                return written.numbers.is_apart_from(other.numbers)
            case "string":
                one, two = written.text, other.text
                return _is_shorter(one.most, two.least) or _is_shorter(two.most, one.least)
            case "array":
                few, many = written.items, other.items
                return _is_shorter(few.most, many.schema_least) or _is_shorter(many.most, few.least)
            case "object":
                return self._members_are_apart(written.members, other.members)
        return False

    def _members_are_apart(self, written: Members, other: Members) -> bool:
        """Whether no object that is written for ``written`` fits ``other``, even with members that
        are not written for ``other``."""
        named = {name: (node, is_required) for name, node, is_required in written.named}
        for name, node, _ in other.named:
            mine, is_mine_required = named.get(name, (None, False))
            is_written = bool(written.others) if name not in named else mine is not None
            if name in other.required and not is_written:
                return True
            if is_mine_required and self._have_other_values(mine, node):
                return True
        return False

    def _have_other_values(self, one: Conjunction, other: Conjunction) -> bool:
        values = self.finite_values(one)
        if values is None or other is None:
            return other is None
        return not any(all(self._fits(value, each) for each in other) for value in values)


_UNEVALUATED = "unevaluatedProperties"
_UNEVALUATED_KEYWORDS = frozenset({_UNEVALUATED, "unevaluatedItems"})
_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_BOUNDS = (
    ("minimum", True),
    ("exclusiveMinimum", True),
    ("maximum", False),
    ("exclusiveMaximum", False),
)


def _distinct(parts: Alternative) -> Alternative:
    return tuple({id(part.schema): part for part in parts}.values())


def _agree(parts: Alternative) -> bool:
    chosen: dict[int, int] = {}
    return all(
        chosen.setdefault(id(part.schema), part.choice.chosen) == part.choice.chosen
        for part in parts
        if part.choice is not None
    )


def _allowed_types(schemas: Sequence[dict[str, Json]]) -> tuple[frozenset[str], bool]:
    """The types that all ``schemas`` allow, and whether numbers must be integers."""
    allowed, has_integers_only = TYPES, False
    for schema in schemas:
        if "type" in schema:
            given = schema["type"]
            names = frozenset([given] if isinstance(given, str) else given)
            if "integer" in names:
                has_integers_only |= "number" not in names
                names = (names - {"integer"}) | {"number"}
            allowed &= names
    return allowed, has_integers_only


def _implied_types(schemas: Sequence[dict[str, Json]]) -> frozenset[str]:
    keywords = frozenset().union(*schemas)
    implied = [name for name, own in _BY_TYPE.items() if own & keywords]
    return frozenset(implied) if len(implied) == 1 and "type" not in keywords else TYPES


def _tags(schema: dict[str, Json]) -> list[str]:
    """Return the names of the properties that tell the branches of ``schema`` apart. They are
    always written: a tag with a default is not among the required names."""
    discriminator = schema.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return [name] if isinstance(name, str) and {"anyOf", "oneOf"} & schema.keys() else []


def _check_of(schema: dict[str, Json]) -> _Check:
    listings = [
        frozenset(map(_key, _listed(schema, keyword)))
        for keyword in ("enum", "const")
        if keyword in schema
    ]
    keys = frozenset.intersection(*listings) if listings else None
    others = {key: value for key, value in schema.items() if key not in ("enum", "const")}
    # What is unevaluated follows from the schemas beside it.
    in_place = _IN_PLACE if _UNEVALUATED_KEYWORDS.isdisjoint(others) else frozenset()
    included = {key: value for key, value in others.items() if key in in_place}
    rest = {key: value for key, value in others.items() if key not in in_place}
    return _Check(keys, included, rest)


def _listed(schema: dict[str, Json], keyword: str) -> list[Json]:
    return schema["enum"] if keyword == "enum" else [schema["const"]]


def _key(value: Json) -> object:
    if isinstance(value, dict):
        return frozenset((name, _key(part)) for name, part in value.items())
    if isinstance(value, list):
        return tuple(map(_key, value))
    return isinstance(value, bool), value


def _exact(path: Path, keyword: str, number: int | float) -> Fraction:
    exact = Fraction(number) if isinstance(number, int) else Fraction(repr(number))
    scaled = exact * 10**MAX_BOUND_DIGITS
    if abs(exact) >= 10**MAX_BOUND_DIGITS or scaled.denominator != 1:
        _refuse(path, keyword, f"has more than {MAX_BOUND_DIGITS} digits")
    return exact


def _check_encodable(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise NotEnforceable("the name of a property has half of a surrogate pair") from None


def _evaluates(schema: dict[str, Json], name: str | None, matches: Callable[[str], bool]) -> bool:
    return (
        "additionalProperties" in schema
        or (name is not None and name in schema.get("properties", ()))
        or any(map(matches, schema.get("patternProperties", ())))
    )


def _finds(text: str, pattern: str) -> bool:
    try:
        with warnings.catch_warnings():
            # Of a "[" in a class, which means itself.
            warnings.simplefilter("ignore")
            return re.search(pattern, text) is not None
    except re.error:
        raise NotEnforceable(
            f"patternProperties.{pattern[:80]} cannot be enforced beside names"
        ) from None


def _subsets(texts: list[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(texts) + 1):
        yield from combinations(texts, count)


def _is_shorter(most: int | None, least: int) -> bool:
    return most is not None and most < least


def _finite_values(shape: Shape) -> list[Json] | None:
    if shape.values is not None:
        return shape.values
    values: list[Json] = []
    for kind in shape.types:
        if kind == "null":
            values.append(None)
        elif kind == "boolean":
            values += [False, True]
        elif kind == "number" and shape.has_integers_only:
            low, high = shape.numbers.integers()
            if low is None or high is None or high - low >= _MAX_FINITE:
                return None
            divisors = [divisor for _, divisor in shape.divisors]
            values += [n for n in range(low, high + 1) if not any(n % d for d in divisors)]
        else:
            return None
    return values
