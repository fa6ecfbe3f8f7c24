"""Regular expressions of ECMA-262 and Python, translated to the syntax of llguidance. Pure.

A translation is *narrow* or *wide*. A text that matches the narrow one matches the expression under
the rules of ECMA-262 and of Python's ``re``. A text that matches under either matches the wide one,
which is what a complement is made of. The two differ in `\\d`, `\\w`, `\\s`, `.` and `$`. Syntax
with different meanings in the two languages is refused, and so is syntax that no regular language
expresses (look-around, back references, word boundaries).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MAX_DEPTH = 64
#: Larger bounds of a repetition are refused.
_MAX_REPEAT = 100_000
_MAX_CODE_POINT = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


class PatternError(ValueError):
    """A regular expression that is malformed or cannot be enforced."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of ``ranges`` of code points and ``categories`` (the letters of `\\d`,
    `\\D`, `\\w`, `\\W`, `\\s` and `\\S`), or any other one if ``negated``."""

    ranges: tuple[tuple[int, int], ...] = ()
    categories: str = ""
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Dot:
    """Any character but a line terminator."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`."""

    is_start: bool


@dataclass(frozen=True, slots=True)
class TextEnd:
    """A `$` at the end of a text, before which Python ignores a line feed."""


@dataclass(frozen=True, slots=True)
class Concat:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    branches: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``most`` None: without bound."""

    part: Node
    least: int
    most: int | None


Node = Chars | Dot | Anchor | TextEnd | Concat | Alternation | Repeat

_ANY = Chars(negated=True)
_ANYTHING = Repeat(_ANY, 0, None)


# parsing

_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]+)(,([0-9]*))?\}")
_NAMED = re.compile(r"\?<[A-Za-z_][A-Za-z0-9_]*>")


def parse(pattern: str) -> Node:
    """Return the syntax tree of ``pattern``. Raises PatternError."""
    parser = _Parser(pattern)
    node = parser.alternation(0)
    if parser.at < len(pattern):
        raise PatternError('a ")" closes no group')
    return node


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def alternation(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise PatternError(f"groups are nested more than {_MAX_DEPTH} deep")
        branches = [self._concat(depth)]
        while self._take("|"):
            branches.append(self._concat(depth))
        return branches[0] if len(branches) == 1 else Alternation(tuple(branches))

    def _concat(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.at < len(self._text) and self._text[self.at] not in "|)":
            parts.append(self._quantified(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _quantified(self, atom: Node) -> Node:
        found = _QUANTIFIER.match(self._text, self.at)
        if found is None:
            if re.compile(r"\{,[0-9]*\}").match(self._text, self.at):
                raise PatternError("{,n} has different meanings in ECMA-262 and Python: use {0,n}")
            return atom
        if isinstance(atom, Anchor):
            raise PatternError("a quantifier follows ^ or $")
        self.at = found.end()
        # A lazy quantifier matches the same texts.
        self._take("?")
        if _QUANTIFIER.match(self._text, self.at):
            raise PatternError("a quantifier follows another one")
        least, most = _bounds(found)
        if most is not None and most < least:
            raise PatternError("the bounds of a repetition are in the wrong order")
        if max(least, most or 0) > _MAX_REPEAT:
            raise PatternError(f"a repetition has a bound above {_MAX_REPEAT}")
        return Repeat(atom, least, most)

    def _atom(self, depth: int) -> Node:
        character = self._next()
        match character:
            case "^" | "$":
                return Anchor(character == "^")
            case ".":
                return Dot()
            case "(":
                return self._group(depth)
            case "[":
                return self._class()
            case "\\":
                return self._escape(is_in_class=False)
            case "*" | "+" | "?":
                raise PatternError(f'nothing stands before the quantifier "{character}"')
        return _character(ord(character))

    def _group(self, depth: int) -> Node:
        if self._text.startswith("?", self.at):
            if named := _NAMED.match(self._text, self.at):
                self.at = named.end()
            elif not self._take("?:"):
                kind = self._text[self.at : self.at + 3]
                is_around = kind.startswith(("?=", "?!", "?<"))
                name = "look-around" if is_around else f"the group ({kind[:2]}"
                raise PatternError(f"{name} cannot be enforced")
        node = self.alternation(depth + 1)
        if not self._take(")"):
            raise PatternError("the parenthesis is not closed")
        return node

    def _class(self) -> Node:
        is_negated = self._take("^")
        if self._text.startswith("]", self.at):
            raise PatternError("an empty class has different meanings in ECMA-262 and Python")
        ranges: list[tuple[int, int]] = []
        categories = ""
        while not self._take("]"):
            low = self._class_member()
            if self._text.startswith("-", self.at) and self._text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = self._class_member()
                if low.categories or high.categories:
                    raise PatternError("a range of characters has a class as its end")
                ends = low.ranges[0][0], high.ranges[0][0]
                if ends[0] > ends[1]:
                    raise PatternError("a range of characters is in the wrong order")
                ranges.append(ends)
            else:
                ranges += low.ranges
                categories += low.categories
        return Chars(tuple(ranges), categories, is_negated)

    def _class_member(self) -> Chars:
        character = self._next("the class of characters is not closed")
        if character == "\\":
            return self._escape(is_in_class=True)
        return _character(ord(character))

    def _escape(self, is_in_class: bool) -> Chars:
        character = self._next("a backslash ends the expression")
        if character in "dDwWsS":
            return Chars(categories=character)
        if character in _CONTROLS:
            return _character(_CONTROLS[character])
        match character:
            case "x":
                return _character(self._hex(2))
            case "u":
                return _character(self._hex(4))
            case "b" if is_in_class:
                return _character(8)
            case "0" if not self._text[self.at : self.at + 1].isdigit():
                return _character(0)
            case "b" | "B":
                raise PatternError(f"the word boundary \\{character} cannot be enforced")
        if character.isdigit():
            raise PatternError(f"the back reference \\{character} cannot be enforced")
        if character.isalpha() or not character.isascii():
            raise PatternError(
                f"the escape \\{character} is unknown, or differs between ECMA-262 and Python"
            )
        return _character(ord(character))

    def _hex(self, count: int) -> int:
        digits = self._text[self.at : self.at + count]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{count}}}", digits):
            raise PatternError(f"a hexadecimal escape needs {count} digits")
        self.at += count
        return int(digits, 16)

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self.at)
        if is_there:
            self.at += len(text)
        return is_there

    def _next(self, problem: str = "the expression ends too early") -> str:
        if self.at == len(self._text):
            raise PatternError(problem)
        self.at += 1
        return self._text[self.at - 1]


def _bounds(found: re.Match[str]) -> tuple[int, int | None]:
    match found[0][0]:
        case "*":
            return 0, None
        case "+":
            return 1, None
        case "?":
            return 0, 1
    if max(len(found[1]), len(found[3] or "")) > 9:
        raise PatternError(f"a repetition has a bound above {_MAX_REPEAT}")
    least = int(found[1])
    if found[2] is None:
        return least, least
    return least, int(found[3]) if found[3] else None


def _character(code: int) -> Chars:
    if code in _SURROGATES:
        raise PatternError("half of a surrogate pair is no character")
    return Chars(((code, code),))


# anchors


def searched(node: Node) -> Node:
    """Return the expression, without anchors, of the texts in which ``node`` is found anywhere.
    Raises PatternError."""
    return _placed(node, _ANYTHING, True, True)


def whole(node: Node) -> Node:
    """Return the expression, without anchors, of the texts that ``node`` matches as a whole.
    Raises PatternError."""
    return _placed(node, Concat(()), True, True)


def _placed(node: Node, around: Node, at_start: bool, at_end: bool) -> Node:
    """Replace the anchors of ``node``, and add ``around`` at the ends of the text without one."""
    if isinstance(node, Alternation):
        branches = (_placed(branch, around, at_start, at_end) for branch in node.branches)
        return Alternation(tuple(branches))
    parts: list[Node] = list(node.parts) if isinstance(node, Concat) else [node]
    before: list[Node] = [around] if at_start else []
    after: list[Node] = [around] if at_end else []
    while at_start and parts and parts[0] == Anchor(True):
        before = []
        del parts[0]
    while at_end and parts and parts[-1] == Anchor(False):
        after = [TextEnd()]
        del parts[-1]
    is_open = before == [around], after == [around]
    if len(parts) == 1 and all(is_open) and _is_group_with_anchor(parts[0]):
        return _placed(parts[0], around, True, True)
    if is_open[0] and parts and _is_group_with_anchor(parts[0]):
        parts[0] = _placed(parts[0], around, True, False)
        before = []
    if is_open[1] and parts and _is_group_with_anchor(parts[-1]):
        parts[-1] = _placed(parts[-1], around, False, True)
        after = []
    if any(map(_has_anchor, parts)):
        raise PatternError("^ or $ cannot be enforced in the middle of an expression")
    return Concat((*before, *parts, *after))


def _is_group_with_anchor(node: Node) -> bool:
    return isinstance(node, Alternation | Concat) and _has_anchor(node)


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Concat(parts) | Alternation(parts):
            return any(map(_has_anchor, parts))
        case Repeat(part):
            return _has_anchor(part)
    return False


# translation

_NARROW = {
    "d": "0-9",
    "D": r"\P{Nd}",
    "w": "0-9A-Za-z_",
    "W": r"[^\w\p{N}]",
    "s": r"\t\n\x0b\x0c\r ",
    "S": r"[^\s\x1c-\x1f\x{85}\x{feff}]",
}
_WIDE = {
    "d": r"\p{Nd}",
    "D": "[^0-9]",
    "w": r"\w\p{N}",
    "W": "[^0-9A-Za-z_]",
    "s": r"\s\x1c-\x1f\x{85}\x{feff}",
    "S": r"[^\t\n\x0b\x0c\r ]",
}
_LINE_ENDS = (0x0A, 0x0D, 0x2028, 0x2029)
#: The characters that JSON writes as an escape sequence, which this server always spells alike.
_ESCAPED = {
    **{code: f"\\u{code:04x}" for code in range(0x20)},
    8: "\\b",
    9: "\\t",
    10: "\\n",
    12: "\\f",
    13: "\\r",
    34: '\\"',
    92: "\\\\",
}
_UNESCAPED = r'[^\x00-\x1f"\\]'
#: One character of a JSON string in any spelling: itself, a short escape, `\uXXXX` outside the
#: surrogates, or a surrogate pair.
_JSON_CHARACTER = (
    "("
    + "|".join(
        (
            _UNESCAPED,
            # A slash would end the expression in Lark.
            r'\\["\\\x2fbfnrt]',
            r"\\u([0-9a-cA-Ce-fE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})",
            r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}",
        )
    )
    + ")"
)


def rust(node: Node, wide: bool = False) -> str:
    """Return ``node``, which has no anchors, in the syntax of Rust's `regex`."""
    return _emit(node, wide, _raw)


def json_text(node: Node, wide: bool = False) -> str:
    """Return what matches the JSON spelling, without quotation marks, of the texts of ``node``.

    Characters have one spelling each. The narrow translation has a control character that JSON
    spells `\\u00XX` only where ``node`` names it: the prefix `\\u00` would otherwise force a model
    that begins to spell another character, such as `\\u00e9`, into a control character.
    """
    return _emit(node, wide, _spelled)


def literal(text: str) -> str:
    """Return the expression that matches ``text`` alone."""
    return "".join(map(_quoted, map(ord, text)))


def json_characters(least: int, most: int | None) -> str:
    """Return what matches every JSON spelling of texts with ``least`` to ``most`` characters."""
    return f"{_JSON_CHARACTER}{{{least},{'' if most is None else most}}}"


def canonical_characters(least: int, most: int | None) -> str:
    """Return what matches the one spelling, as in ``json_text``, of such texts."""
    return json_text(Repeat(_ANY, least, most))


def _emit(node: Node, wide: bool, chars: Callable[[Chars, bool], str]) -> str:
    match node:
        case Chars():
            return chars(node, wide)
        case Dot():
            ends = _LINE_ENDS[:1] if wide else _LINE_ENDS
            return chars(Chars(tuple((end, end) for end in ends), negated=True), wide)
        case TextEnd():
            return f"({chars(_character(10), wide)})?" if wide else ""
        case Anchor():
            raise AssertionError("an anchor that was not placed")
        case Concat(parts):
            return "".join(_emit(part, wide, chars) for part in parts)
        case Alternation(branches):
            return "(" + "|".join(_emit(branch, wide, chars) for branch in branches) + ")"
        case Repeat(part, least, most):
            bounds = f"{{{least},{'' if most is None else most}}}"
            return f"({_emit(part, wide, chars)}){bounds}"


def _raw(node: Chars, wide: bool) -> str:
    if not node.negated and not node.categories and _is_single(node.ranges):
        return _quoted(node.ranges[0][0])
    return _class_text(node, wide)


def _spelled(node: Chars, wide: bool) -> str:
    if not node.negated and not node.categories and _is_single(node.ranges):
        code = node.ranges[0][0]
        return literal(_ESCAPED.get(code, chr(code)))
    escaped = [
        literal(text)
        for code, text in _ESCAPED.items()
        if _has(node, code, wide) and (wide or len(text) == 2 or _names(node, code))
    ]
    plain = f"[{_class_text(node, wide)}&&{_UNESCAPED}]"
    return "(" + "|".join([plain, *escaped]) + ")"


def _names(node: Chars, code: int) -> bool:
    return not node.negated and any(low <= code <= high < 0x20 for low, high in node.ranges)


def _is_single(ranges: Sequence[tuple[int, int]]) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _class_text(node: Chars, wide: bool) -> str:
    if not node.ranges and not node.categories:
        return r"[\x00-\x{10ffff}]"
    names = _WIDE if wide != node.negated else _NARROW
    ranges = "".join(f"{_quoted(low)}-{_quoted(high)}" for low, high in node.ranges)
    members = ranges + "".join(names[category] for category in node.categories)
    return f"[{'^' if node.negated else ''}{members}]"


def _has(node: Chars, code: int, wide: bool) -> bool:
    is_inner_wide = wide != node.negated
    is_member = any(low <= code <= high for low, high in node.ranges) or any(
        _in_category(category, code, is_inner_wide) for category in node.categories
    )
    return is_member != node.negated


def _in_category(category: str, code: int, wide: bool) -> bool:
    if category in "DW":
        return True
    is_space = 9 <= code <= 13 or (0x1C <= code <= 0x1F)
    if category == "s":
        return 9 <= code <= 13 or (wide and is_space)
    return category == "S" and (not 9 <= code <= 13 if wide else not is_space)


def _quoted(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"
