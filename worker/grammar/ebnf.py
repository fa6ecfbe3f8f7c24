"""Translation of GBNF, the EBNF of llama.cpp and xgrammar, to llguidance's Lark syntax. Pure.

llguidance's lexer always takes the longest lexeme, whereas GBNF has no lexer. In the translation
each lexeme is a single character, so that the translated grammar matches the same texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_MAX_DEPTH = 100
_MAX_REPEAT = 10_000
_MAX_CODE_POINT = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_ROOT = "root"


class EbnfError(ValueError):
    """Raised if a grammar is malformed, exceeds a limit, or matches no text of finite length."""


@dataclass(frozen=True, slots=True)
class Chars:
    """Single character within ``ranges`` of code points, or outside all of them if ``negated``.

    The ends of a range are part of it.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Concat:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    branches: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Repetition of ``part``, ``least`` to ``most`` times; ``most`` is None without a limit."""

    part: Node
    least: int
    most: int | None


Node = Chars | Reference | Concat | Alternation | Repeat


def lark_of_ebnf(text: str) -> str:
    """Return the GBNF grammar ``text`` in Lark syntax.

    Raises EbnfError if it is malformed, matches no text of finite length, is nested too deeply, or
    repeats a part more than 10,000 times.
    """
    try:
        return _lark(text)
    except RecursionError:
        raise EbnfError("the grammar is nested too deeply") from None


def _lark(text: str) -> str:
    rules = _Parser(text).rules()
    if _ROOT not in rules:
        raise EbnfError('the grammar has no rule with the name "root"')
    for rule in rules.values():
        for name in _references(rule):
            if name not in rules:
                raise EbnfError(f'the rule "{name[:64]}" is not defined')
    productive = _productive(rules)
    if _ROOT not in productive:
        raise EbnfError("no text of finite length fits the grammar")
    names = {name: f"r{at}" for at, name in enumerate(rules)}
    terminals: dict[str, str] = {}
    lines = [f"start: {names[_ROOT]}"]
    for name in productive:
        lines.append(f"{names[name]}: {_written(rules[name], names, productive, terminals)}")
    lines += [f"{name}: /{expression}/" for expression, name in terminals.items()]
    return "\n".join(lines) + "\n"


# parsing

_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
# Without possessive quantifiers, the search would split a row of n "#" in 2^n ways.
_DEFINES = re.compile(r"[A-Za-z0-9_-]++(?:\s|#[^\n]*+)*+::=")
_QUANTIFIER = re.compile(r"[*+?]|\{\s*+([0-9]{1,9})\s*+(,\s*+([0-9]{1,9})?\s*+)?\}")
_ESCAPES = {"n": 10, "t": 9, "r": 13, "0": 0, "a": 7, "b": 8, "f": 12, "v": 11, "e": 27}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, Node]:
        result: dict[str, Node] = {}
        self._skip()
        while self._at < len(self._text):
            found = _NAME.match(self._text, self._at)
            if found is None or not _DEFINES.match(self._text, self._at):
                raise self._error("expected a rule: name ::= ...")
            self._at = found.end()
            self._skip()
            self._at += len("::=")
            if found[0] in result:
                raise EbnfError(f'the rule "{found[0][:64]}" is defined twice')
            result[found[0]] = self._alternation(0)
        return result

    def _alternation(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise EbnfError(f"groups are nested more than {_MAX_DEPTH} deep")
        branches = [self._concat(depth)]
        while self._take("|"):
            branches.append(self._concat(depth))
        return branches[0] if len(branches) == 1 else Alternation(tuple(branches))

    def _concat(self, depth: int) -> Node:
        parts: list[Node] = []
        while True:
            self._skip()
            if self._at == len(self._text) or self._text[self._at] in "|)":
                break
            if _DEFINES.match(self._text, self._at):
                break
            parts.append(self._quantified(self._element(depth)))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _quantified(self, node: Node) -> Node:
        self._skip()
        while found := _QUANTIFIER.match(self._text, self._at):
            self._at = found.end()
            self._skip()
            match found[0][0]:
                case "*":
                    bounds: tuple[int, int | None] = (0, None)
                case "+":
                    bounds = (1, None)
                case "?":
                    bounds = (0, 1)
                case _:
                    least = int(found[1])
                    bounds = (least, least if found[2] is None else None)
                    if found[3]:
                        bounds = (least, int(found[3]))
            least, most = bounds
            if max(least, most or 0) > _MAX_REPEAT or (most is not None and most < least):
                raise self._error(
                    f"the bounds of a repetition must be ascending and at most {_MAX_REPEAT}"
                )
            node = Repeat(node, least, most)
        return node

    def _element(self, depth: int) -> Node:
        if self._take('"'):
            return self._literal()
        if self._take("["):
            return self._class()
        if self._take("."):
            return Chars(negated=True)
        if self._take("("):
            node = self._alternation(depth + 1)
            self._skip()
            if not self._take(")"):
                raise self._error("the parenthesis is not closed")
            return node
        if found := _NAME.match(self._text, self._at):
            self._at = found.end()
            return Reference(found[0])
        raise self._error("expected a literal, a class of characters, a group or a rule's name")

    def _literal(self) -> Node:
        codes = []
        start = self._at
        while not self._take('"'):
            codes.append(self._character("the literal is not closed", start))
        return Concat(tuple(Chars(((code, code),)) for code in codes))

    def _class(self) -> Node:
        problem, start = "the class of characters is not closed", self._at
        is_negated = self._take("^")
        ranges = []
        while not self._take("]"):
            low = high = self._character(problem, start)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character(problem, start)
            if low > high:
                raise self._error("a range of characters is in the wrong order")
            ranges.append((low, high))
        if not ranges:
            raise self._error("a class of characters is empty")
        return Chars(tuple(ranges), negated=is_negated)

    def _character(self, problem: str, start: int) -> int:
        """Return the code point of the next character or escape, which may be a line feed.

        At the end of the text, raise EbnfError with ``problem`` and the line of offset ``start``.
        """
        if self._at == len(self._text):
            self._at = start
            raise self._error(problem)
        character = self._text[self._at]
        self._at += 1
        code = ord(character) if character != "\\" else self._escape()
        if code in _SURROGATES or code > _MAX_CODE_POINT:
            raise self._error("an escape stands for no Unicode character")
        return code

    def _escape(self) -> int:
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if count := _HEX_DIGITS.get(kind):
            digits = self._text[self._at : self._at + count]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{count}}}", digits):
                raise self._error(f"the escape \\{kind} needs {count} hexadecimal digits")
            self._at += count
            return int(digits, 16)
        if not kind or kind.isalnum() or not kind.isascii() or kind.isspace():
            raise self._error(f"the escape \\{kind} is unknown")
        return ord(kind)

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self._at)
        if is_there:
            self._at += len(text)
        return is_there

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None, "_SPACE matches the empty text"
        self._at = found.end()

    def _error(self, problem: str) -> EbnfError:
        line = self._text.count("\n", 0, self._at) + 1
        return EbnfError(f"line {line} of the grammar: {problem}")


# productive rules


def _references(node: Node) -> Iterator[str]:
    match node:
        case Reference(name):
            yield name
        case Concat(parts) | Alternation(parts):
            for part in parts:
                yield from _references(part)
        case Repeat(part):
            yield from _references(part)


def _productive(rules: Mapping[str, Node]) -> dict[str, None]:
    """Return the names of the rules that match some finite text, by a least fixed point."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, rule in rules.items():
        for used in _references(rule):
            users[used].add(name)
    found: dict[str, None] = {}
    queue = list(rules)
    while queue:
        name = queue.pop()
        if name not in found and _can_end(rules[name], found):
            found[name] = None
            queue += users[name]
    return found


def _can_end(node: Node, productive: Mapping[str, None]) -> bool:
    match node:
        case Chars():
            return True
        case Reference(name):
            return name in productive
        case Concat(parts):
            return all(_can_end(part, productive) for part in parts)
        case Alternation(branches):
            return any(_can_end(branch, productive) for branch in branches)
        case Repeat(part, least):
            return least == 0 or _can_end(part, productive)


# writing


def _written(
    node: Node,
    names: Mapping[str, str],
    productive: Mapping[str, None],
    terminals: dict[str, str],
) -> str:
    match node:
        case Chars():
            return terminals.setdefault(_expression(node), f"T{len(terminals)}")
        case Reference(name):
            return names[name]
        case Concat(parts):
            written = [_written(part, names, productive, terminals) for part in parts]
            return f"({' '.join(written)})" if written else '""'
        case Alternation(branches):
            productive_branches = [branch for branch in branches if _can_end(branch, productive)]
            written = [
                _written(branch, names, productive, terminals) for branch in productive_branches
            ]
            return f"({' | '.join(written)})"
        case Repeat(part, least, most):
            if most == 0 or not _can_end(part, productive):
                return '""'
            written_part = _written(part, names, productive, terminals)
            return f"({written_part}){{{least},{'' if most is None else most}}}"


def _expression(node: Chars) -> str:
    """Return ``node`` as a regular expression in Rust's syntax."""
    if not node.ranges:
        return "(?s:.)"
    ranges = "".join(rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in node.ranges)
    return f"[{'^' if node.negated else ''}{ranges}]"
