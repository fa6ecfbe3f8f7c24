"""The grammar, in llguidance's Lark syntax, of the JSON texts that a schema allows.

Strings have every spelling that JSON has. Names, listed values and strings with a pattern or format
have one spelling each: no escape sequence where none is needed. Between tokens there is a space or
the beginning of an indented line, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm

from worker.grammar import patterns
from worker.grammar.numbers import EXACT_DIGITS, integer_terminal, number_terminal
from worker.grammar.schema import (
    MAX_COUNT,
    Conjunction,
    Document,
    Items,
    Json,
    Keys,
    Members,
    NotEnforceable,
    Shape,
    Text,
    parse,
)
from worker.grammar.vocabulary import LimitExceeded, allowed_tokens, token_matcher, token_trie

_MAX_RULES = 20_000
#: Sets of values that an array with unique items may have used; more are written in order.
_MAX_USED_SETS = 512
#: As much indentation as JSON of a reasonable depth needs.
_WHITESPACE = r"/ |\n[ \t]{0,15}/"
#: llguidance computes in 64 bits where it tests a number for divisibility.
_MAX_DIVISIBLE = 2**53


def json_grammar(text: str) -> str:
    """Return the grammar of the JSON schema ``text``. Raises NotEnforceable."""
    try:
        return _Writer(Document(parse(text))).grammar()
    except RecursionError:
        raise NotEnforceable("the schema is nested too deeply, or its references are") from None


class _Writer:
    def __init__(self, document: Document) -> None:
        self._document = document
        #: by the schemas of a node; in the order in which they were found
        self._nodes: dict[tuple[int, ...], tuple[str, list[Shape]]] = {}
        self._productive: set[tuple[int, ...]] = set()
        #: with numbers of more digits than are written
        self._too_fine: set[tuple[int, ...]] = set()
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}

    def grammar(self) -> str:
        root = self._document.root
        self._find_nodes(root)
        for _, shapes in self._nodes.values():
            for shape in shapes:
                self._document.check_exclusive(shape)
        self._find_productive()
        if not self._can_end(root):
            raise NotEnforceable(self._impossible(root))
        for name, shapes in list(self._nodes.values()):
            self._write_node(name, shapes)
        terminals = [f"{name}: {value}" for value, name in self._terminals.items()]
        return "\n".join([f"start: {self._name(root)}", *self._rules, *terminals]) + "\n"

    # nodes

    def _find_nodes(self, root: Conjunction) -> None:
        """Resolve all nodes that ``root`` leads to, and drop the shapes that no value has."""
        queue = [root]
        while queue:
            node = queue.pop()
            if node is None or (key := _key(node)) in self._nodes:
                continue
            found = self._document.shapes(node)
            if any("number" in shape.types and self._is_too_fine(shape) for shape in found):
                self._too_fine.add(key)
            shapes = [shape for shape in found if self._has_values(shape)]
            self._nodes[key] = (f"n{len(self._nodes)}", shapes)
            for shape in shapes:
                queue += _children(shape)

    def _has_values(self, shape: Shape) -> bool:
        """Drop the types of ``shape`` of which no value fits. Returns False if none is left."""
        if shape.values is not None:
            return bool(shape.values)
        impossible = set()
        if "number" in shape.types and self._number(shape) is None:
            impossible.add("number")
        if "string" in shape.types and self._string(shape.text) is None:
            impossible.add("string")
        if "object" in shape.types:
            members = shape.members
            members.others = [
                (keys, node) for keys, node in members.others if self._key_terminal(keys, members)
            ]
        shape.types -= impossible
        return bool(shape.types)

    def _find_productive(self) -> None:
        """Find the nodes that finite texts fit: the least fixed point."""
        has_grown = True
        while has_grown:
            has_grown = False
            for key, (_, shapes) in self._nodes.items():
                if key not in self._productive and any(map(self._is_productive, shapes)):
                    self._productive.add(key)
                    has_grown = True

    def _is_productive(self, shape: Shape) -> bool:
        if shape.values is not None or shape.types - {"object", "array"}:
            return True
        is_object = "object" in shape.types and self._counts(shape.members) is not None
        return is_object or ("array" in shape.types and self._can_fill(shape.items))

    def _can_end(self, node: Conjunction) -> bool:
        return node is not None and _key(node) in self._productive

    def _counts(self, members: Members) -> tuple[int, int] | None:
        """Return how many named members are required and possible, None if no object fits."""
        required = sum(is_required for _, _, is_required in members.named)
        if any(is_required and not self._can_end(node) for _, node, is_required in members.named):
            return None
        possible = sum(self._can_end(node) for _, node, _ in members.named)
        # Other keys may be written twice, and then count once.
        has_others = any(self._can_end(node) for _, node in members.others)
        if possible + has_others < members.least:
            return None
        if members.most is not None and max(members.least, required) > members.most:
            return None
        return required, possible

    def _can_fill(self, items: Items) -> bool:
        most = self._most_items(items)
        if most is not None and most < items.least:
            return False
        if items.are_unique and (most is None or most > 1):
            return self._set_of(items) is not None
        return True

    def _most_items(self, items: Items) -> int | None:
        for at, node in enumerate(items.front):
            if not self._can_end(node):
                return at if items.most is None else min(at, items.most)
        if not self._can_end(items.rest):
            return min(len(items.front), items.most if items.most is not None else 1 << 62)
        return items.most

    def _impossible(self, node: Conjunction) -> str:
        """Return the cause that no value fits ``node``, and where it is found."""
        seen: set[tuple[int, ...]] = set()
        where, general = "the schema:", "no value of finite length fits"
        cause = general
        while node and _key(node) not in seen:
            seen.add(_key(node))
            where = self._document.place(node)
            is_too_fine = _key(node) in self._too_fine
            cause = f"no number of at most {EXACT_DIGITS} digits fits" if is_too_fine else general
            children = [part for shape in self._nodes[_key(node)][1] for part in _required(shape)]
            node = next((child for child in children if not self._can_end(child)), None)
        return f"{where} {cause}"

    def _name(self, node: Conjunction) -> str:
        assert node is not None
        return self._nodes[_key(node)][0]

    # rules

    def _rule(self, name: str, alternatives: Sequence[str]) -> None:
        if len(self._rules) >= _MAX_RULES:
            raise NotEnforceable("the schema needs too many grammar rules")
        self._rules.append(f"{name}: " + " | ".join(alternatives))

    def _terminal(self, expression: str) -> str:
        return self._terminals.setdefault(expression, f"T{len(self._terminals)}")

    @property
    def _space(self) -> str:
        return f"{self._terminal(_WHITESPACE)}?"

    def _write_node(self, name: str, shapes: Sequence[Shape]) -> None:
        alternatives: list[str] = []
        for at, shape in enumerate(shapes):
            if shape.values is not None:
                alternatives.append(self._values(shape.values))
            elif self._is_productive(shape):
                alternatives += self._typed(f"{name}_{at}", shape)
        if alternatives:
            self._rule(name, list(dict.fromkeys(alternatives)))

    def _typed(self, name: str, shape: Shape) -> list[str]:
        result: list[str] = []
        for kind in sorted(shape.types):
            match kind:
                case "null" | "boolean":
                    result.append(self._values([None] if kind == "null" else [False, True]))
                case "number":
                    result.append(self._write_number(f"{name}_n", shape))
                case "string":
                    text = self._string(shape.text)
                    assert text is not None
                    result.append(self._terminal(text))
                case "object" if self._counts(shape.members) is not None:
                    self._write_object(f"{name}_o", shape.members)
                    result.append(f"{name}_o")
                case "array" if self._can_fill(shape.items):
                    self._write_array(f"{name}_a", shape.items)
                    result.append(f"{name}_a")
        return result

    def _values(self, values: Sequence[Json]) -> str:
        return self._terminal(
            "/" + "|".join(patterns.literal(_text(each)) for each in values) + "/"
        )

    # numbers

    def _number(self, shape: Shape) -> str | None:
        """Return a terminal's expression, None if no number fits."""
        if not shape.divisors and not shape.has_integers_only:
            return number_terminal(shape.numbers)
        if shape.divisors:
            low, high, divisor = _multiples(shape)
            if high // divisor * divisor < low:
                return None
        return integer_terminal(shape.numbers)

    def _is_too_fine(self, shape: Shape) -> bool:
        is_any = not shape.divisors and not shape.has_integers_only and shape.values is None
        return is_any and not shape.numbers.is_empty and self._number(shape) is None

    def _write_number(self, name: str, shape: Shape) -> str:
        if not shape.divisors:
            expression = self._number(shape)
            assert expression is not None
            return self._terminal(expression)
        low, high, divisor = _multiples(shape)
        schema = {"type": "integer", "multipleOf": divisor, "minimum": low, "maximum": high}
        self._rule(name, [f"%json {json.dumps(schema)}"])
        return name

    # strings

    def _string(self, text: Text, is_key: bool = False) -> str | None:
        """Return a terminal's expression, None if no string fits. Keys have one spelling each, or a
        name could be written twice."""
        if text.most is not None and text.most < text.least:
            return None
        parts = [f'/"{patterns.json_text(each)}"/' for each in text.patterns]
        if not parts or text.least or text.most is not None:
            is_canonical = is_key or bool(text.patterns)
            spelled = patterns.canonical_characters if is_canonical else patterns.json_characters
            parts.append(f'/"{spelled(text.least, text.most)}"/')
        expression = " & ".join(parts)
        return None if text.patterns and _is_empty(expression) else expression

    # objects

    def _key_terminal(self, keys: Keys, members: Members) -> str | None:
        """Return a terminal's expression for the keys of other members, None if there are none."""
        texts = [
            text for each in keys.texts if (text := self._string(each, is_key=True)) is not None
        ]
        if not texts:
            return None
        parts = ["(" + " | ".join(f"({text})" for text in texts) + ")"]
        parts += [f'/"{patterns.json_text(each)}"/' for each in keys.found]
        parts += [f'~/"{patterns.json_text(each, wide=True)}"/' for each in keys.not_found]
        if members.names:
            names = "|".join(patterns.literal(_text(name)) for name in members.names)
            parts.append(f"~/{names}/")
        expression = " & ".join(parts)
        is_plain = not keys.found and not keys.not_found
        return None if not is_plain and _is_empty(expression) else expression

    def _write_object(self, name: str, members: Members) -> None:
        """Write rules for what follows when the members before ``at`` were written or left out, and
        ``count`` of them written; where the number does not matter, 1 stands for any."""
        counts = self._counts(members)
        assert counts is not None
        named = [(key, node, must) for key, node, must in members.named if self._can_end(node)]
        others = [
            f'{self._terminal(expression)} ":" {self._space} {self._name(node)}'
            for keys, node in members.others
            if self._can_end(node) and (expression := self._key_terminal(keys, members))
        ]
        if others:
            self._rule(f"{name}_x", others)
        least, most = members.least, members.most
        is_counted = least > counts[0] or (most is not None and (bool(others) or most < len(named)))
        if not is_counted:
            least, most = 0, None
        ends = self._ends(f"{name}_x" if others else "", "}")
        rules: dict[tuple[int, int], list[str]] = {}
        for at in range(len(named), -1, -1):
            for count in range((at if is_counted else min(at, 1)) + 1):
                rule = ends(count, least, most, 1) if at == len(named) else []
                if at < len(named):
                    key, node, is_required = named[at]
                    after = (at + 1, count + 1 if is_counted else 1)
                    if rules.get(after) and (most is None or count < most):
                        comma = f'"," {self._space} ' if count else ""
                        value = f"{self._literal(_text(key))} {self._space} {self._name(node)}"
                        rule.append(f"{comma}{value} {name}_{after[0]}_{after[1]}")
                    if not is_required and rules.get((at + 1, count)):
                        rule.append(f"{name}_{at + 1}_{count}")
                rules[at, count] = rule
        self._rule(name, [f'"{{" {self._space} {name}_0_0'])
        for (at, count), rule in rules.items():
            if rule:
                self._rule(f"{name}_{at}_{count}", rule)

    def _literal(self, key: str) -> str:
        return self._terminal(f"/{patterns.literal(key + ':')}/")

    def _ends(self, element: str, bracket: str) -> Callable[[int, int, int | None, int], list[str]]:
        """Return a function that gives the alternatives for the rest of an object or array: any
        number of ``element``, and its closing ``bracket``."""

        def ends(count: int, least: int, most: int | None, num_distinct: int) -> list[str]:
            """``count`` elements are there, of ``least`` to ``most``. At most ``num_distinct`` of
            those to come are known to differ from each other."""
            low = max(0, least - count)
            high = None if most is None else most - count
            if not element or high == 0:
                return [f'{self._space if count else ""} "{bracket}"'] if low == 0 else []
            if low > num_distinct or (high is not None and high < low):
                return []
            more = f'("," {self._space} {element})'
            if count:
                return [f'{_times(more, low, high)} {self._space} "{bracket}"']
            following = _times(more, max(low - 1, 0), None if high is None else high - 1)
            some = f'{element} {following} {self._space} "{bracket}"'
            return [some, f'"{bracket}"'] if low == 0 else [some]

        return ends

    # arrays

    def _write_array(self, name: str, items: Items) -> None:
        most = self._most_items(items)
        if items.are_unique and (most is None or most > 1):
            self._write_set(name, items)
            return
        width = len(items.front)
        rest = self._name(items.rest) if self._can_end(items.rest) else ""
        ends = self._ends(rest, "]")
        rules: list[tuple[str, list[str]]] = []
        is_alive = False
        for at in range(width, -1, -1):
            if at == width:
                rule = ends(at, items.least, most, MAX_COUNT) if most is None or most >= at else []
            else:
                rule = [f'{self._space if at else ""} "]"'] if at >= items.least else []
                if is_alive and (most is None or at < most):
                    comma = f'"," {self._space} ' if at else ""
                    rule.append(f"{comma}{self._name(items.front[at])} {name}_{at + 1}")
            is_alive = bool(rule)
            rules.append((f"{name}_{at}", rule))
        self._rule(name, [f'"[" {self._space} {name}_0'])
        for rule_name, rule in rules:
            if rule:
                self._rule(rule_name, rule)

    def _set_of(self, items: Items) -> dict[_Used, list[tuple[Json, _Used]]] | None:
        """Return the states of an array with unique items, each with the next values and where
        they lead; None if no array fits. The first state is the empty array."""
        nodes = [*items.front, items.rest]
        values = [self._document.finite_values(node) if node is not None else [] for node in nodes]
        if any(each is None for each in values):
            place = ".".join((*items.path, "uniqueItems"))
            raise NotEnforceable(
                f"{place[-200:]} cannot be enforced unless the items have few values (enum, const,"
                " boolean, or integers of a small range)"
            )
        states = self._states(values, items, is_ordered=False)
        if states is None and not items.front:
            states = self._states(values, items, is_ordered=True)
        if states is None:
            place = ".".join((*items.path, "uniqueItems"))
            raise NotEnforceable(f"{place[-200:]} cannot be enforced for so many values")
        return states or None

    def _states(
        self, values: Sequence[Sequence[Json] | None], items: Items, is_ordered: bool
    ) -> dict[_Used, list[tuple[Json, _Used]]] | None:
        most = self._most_items(items)
        is_counted = not is_ordered or items.least > 1 or most is not None
        start = _Used(0, frozenset())
        states: dict[_Used, list[tuple[Json, _Used]]] = {start: []}
        queue = [start]
        for state in queue:
            if most is not None and state.count >= most:
                continue
            for at, value in enumerate(values[min(state.count, len(values) - 1)] or ()):
                mark = _text(value)
                if mark in state.marks or (is_ordered and at < state.place):
                    continue
                marks = frozenset() if is_ordered else state.marks | {mark}
                count = state.count + 1 if is_counted else 1
                after = _Used(count, marks, at + 1 if is_ordered else 0)
                states[state].append((value, after))
                if after not in states:
                    if len(states) >= _MAX_USED_SETS:
                        return None
                    states[after] = []
                    queue.append(after)
        for state in sorted(states, key=lambda state: (-state.count, -state.place)):
            states[state] = [each for each in states[state] if each[1] in states]
            if not states[state] and state.count < items.least:
                del states[state]
        return {state: states[state] for state in queue if state in states}

    def _write_set(self, name: str, items: Items) -> None:
        states = self._set_of(items)
        assert states is not None
        names = {state: f"{name}_{at}" for at, state in enumerate(states)}
        self._rule(name, [f'"[" {self._space} {name}_0'])
        for state, steps in states.items():
            comma = f'"," {self._space} ' if state.count else ""
            rule = [f"{comma}{self._values([value])} {names[after]}" for value, after in steps]
            if state.count >= items.least:
                rule.append(f'{self._space if state.count else ""} "]"')
            self._rule(names[state], rule)


@dataclass(frozen=True, slots=True)
class _Used:
    count: int
    marks: frozenset[str]
    place: int = 0


def _times(element: str, least: int, most: int | None) -> str:
    return "" if most == 0 else f"{element}{{{least},{'' if most is None else most}}}"


_BYTES = token_trie([bytes([byte]) for byte in range(256)], slices=())


@cache
def _is_empty(expression: str) -> bool:
    matcher = token_matcher(_BYTES, f"start: T\nT: {expression}\n")
    try:
        # The last one is the end token.
        return not any(allowed_tokens(matcher)[: 256 // 8])
    except LimitExceeded:
        raise NotEnforceable("the schema has too complex regular expressions") from None


def _key(node: Sequence[dict[str, Json]]) -> tuple[int, ...]:
    return tuple(map(id, node))


def _text(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _children(shape: Shape) -> list[Conjunction]:
    if shape.values is not None:
        return []
    result: list[Conjunction] = []
    if "object" in shape.types:
        result += [node for _, node, _ in shape.members.named]
        result += [node for _, node in shape.members.others]
    if "array" in shape.types:
        result += [*shape.items.front, shape.items.rest]
    return result


def _multiples(shape: Shape) -> tuple[int, int, int]:
    """Return the least and the greatest integer of ``shape``, and what divides it. Raises
    NotEnforceable."""
    low, high = shape.numbers.integers()
    low = -_MAX_DIVISIBLE if low is None else low
    high = _MAX_DIVISIBLE if high is None else high
    divisor = lcm(*(divisor for _, divisor in shape.divisors))
    if max(abs(low), abs(high), divisor) > _MAX_DIVISIBLE:
        path = ".".join((*shape.divisors[0][0], "multipleOf"))
        raise NotEnforceable(f"{path[-200:]} cannot be enforced beyond 2^53")
    return low, high, divisor


def _required(shape: Shape) -> list[Conjunction]:
    members = [node for _, node, is_required in shape.members.named if is_required]
    items = [*shape.items.front, shape.items.rest]
    return members + items[: shape.items.least]
