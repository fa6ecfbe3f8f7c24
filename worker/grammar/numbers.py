"""Regular expressions for the decimal numbers of a range, exact for bounds of any size. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor

#: Digits before the point of a number whose bounds need no more.
_MAX_DIGITS = 20
#: Digits of a number in all where its fraction matters: a double keeps that many apart.
EXACT_DIGITS = 15
#: Bounds with more digits before or behind the point are refused.
MAX_BOUND_DIGITS = 100
_DIGIT = "[0-9]"


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``; None: without bound."""

    low: Fraction | None = None
    high: Fraction | None = None
    excludes_low: bool = False
    excludes_high: bool = False

    def above(self, bound: Fraction, excludes: bool) -> Range:
        if self.low is None or (bound, excludes) > (self.low, self.excludes_low):
            return replace(self, low=bound, excludes_low=excludes)
        return self

    def below(self, bound: Fraction, excludes: bool) -> Range:
        if self.high is None or (-bound, excludes) > (-self.high, self.excludes_high):
            return replace(self, high=bound, excludes_high=excludes)
        return self

    def integers(self) -> tuple[int | None, int | None]:
        """The least and the greatest integer of the range."""
        low = high = None
        if self.low is not None:
            low = floor(self.low) + 1 if self.excludes_low else ceil(self.low)
        if self.high is not None:
            high = ceil(self.high) - 1 if self.excludes_high else floor(self.high)
        return low, high

    @property
    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        excludes = self.excludes_low or self.excludes_high
        return self.low > self.high or (excludes and self.low == self.high)

    def is_apart_from(self, other: Range) -> bool:
        return _is_below(self, other) or _is_below(other, self)


def _is_below(one: Range, other: Range) -> bool:
    if one.high is None or other.low is None:
        return False
    touches = one.high == other.low and not (one.excludes_high or other.excludes_low)
    return one.high <= other.low and not touches


def integer_terminal(numbers: Range) -> str | None:
    """Return a Lark expression for the integers of the range, None if there are none."""
    low, high = numbers.integers()
    if low is not None and high is not None and low > high:
        return None
    width = max(_MAX_DIGITS, len(str(abs(low or 0))) + 1, len(str(abs(high or 0))))
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        most = None if low is None else _at_most(-low)
        parts.append(f'("-" {_both(_at_least(least, width), most)})')
    if high is None or high >= 0:
        most = None if high is None else _at_most(high)
        parts.append(_both(_at_least(max(low or 0, 0), width), most))
    return " | ".join(parts)


def number_terminal(numbers: Range) -> str | None:
    """Return a Lark expression for the numbers of the range, None if there are none.

    Validators read a fraction as a double, so there are no more digits behind the point than keep a
    number on its side of a bound.
    """
    if numbers.low is None and numbers.high is None:
        digits = f"(0|[1-9]{_DIGIT}{{0,{_MAX_DIGITS - 1}}})"
        fraction = f"(\\.{_DIGIT}{{1,{EXACT_DIGITS}}})?"
        return f"/-?{digits}{fraction}([eE][-+]?{_DIGIT}{{1,2}})?/"
    bounds = [abs(bound) for bound in (numbers.low, numbers.high) if bound is not None]
    places = max(0, EXACT_DIGITS - len(str(floor(max(bounds)))))
    scale = 10**places
    scaled = Range(
        None if numbers.low is None else numbers.low * scale,
        None if numbers.high is None else numbers.high * scale,
        numbers.excludes_low,
        numbers.excludes_high,
    )
    low, high = scaled.integers()
    if low is not None and high is not None and low > high:
        return None
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        most = None if low is None else -low
        parts.append(f'("-" {_both_decimals(least, most, places)})')
    if high is None or high >= 0:
        parts.append(_both_decimals(max(low or 0, 0), high, places))
    return " | ".join(parts)


def _both_decimals(least: int, most: int | None, places: int) -> str:
    upper = None if most is None else _decimal_at_most(most, places)
    return _both(_decimal_at_least(least, places), upper)


def _both(lower: str, upper: str | None) -> str:
    return f"/{lower}/" if upper is None else f"(/{lower}/ & /{upper}/)"


def _at_least(number: int, width: int) -> str:
    text = str(number)
    if number == 0:
        return f"(0|[1-9]{_DIGIT}{{0,{width - 1}}})"
    longer = f"[1-9]{_DIGIT}{{{len(text)},{width - 1}}}"
    return "(" + "|".join([longer, *_greater(text), text]) + ")"


def _at_most(number: int) -> str:
    text = str(number)
    parts = [*_smaller(text, is_integer=True), text]
    if len(text) > 1:
        parts += ["0", f"[1-9]{_DIGIT}{{0,{len(text) - 2}}}"]
    return "(" + "|".join(parts) + ")"


def _decimal_at_least(scaled: int, places: int) -> str:
    whole, digits = _split(scaled, places)
    width = max(_MAX_DIGITS, len(str(whole + 1)) + 1)
    above = f"{_at_least(whole + 1, width)}{_fraction(places)}"
    if not digits:
        return f"({above}|{whole}{_fraction(places)})"
    fractions = [*_greater(digits, places), digits + _more(places - len(digits))]
    return f"({above}|{whole}\\.({'|'.join(fractions)}))"


def _decimal_at_most(scaled: int, places: int) -> str:
    whole, digits = _split(scaled, places)
    parts = [f"{_at_most(whole - 1)}{_fraction(places)}"] if whole else []
    if not places:
        return "(" + "|".join([*parts, str(whole)]) + ")"
    zeros = f"0{{0,{places - len(digits)}}}"
    fractions = [*_smaller(digits, is_integer=False, places=places), digits + zeros]
    # A shorter fraction is a smaller one.
    fractions += [digits[:end] for end in range(1, len(digits))]
    if not digits:
        fractions = [f"0{{1,{places}}}"]
    parts.append(f"{whole}(\\.({'|'.join(fractions)}))?")
    return "(" + "|".join(parts) + ")"


def _split(scaled: int, places: int) -> tuple[int, str]:
    whole, rest = divmod(scaled, 10**places)
    return whole, f"{rest:0{places}d}".rstrip("0") if places else ""


def _fraction(places: int) -> str:
    return f"(\\.{_DIGIT}{{1,{places}}})?" if places else ""


def _more(count: int) -> str:
    return f"{_DIGIT}{{0,{count}}}"


def _greater(text: str, places: int | None = None) -> list[str]:
    return [
        f"{text[:at]}[{int(digit) + 1}-9]{_rest(text, at, places)}"
        for at, digit in enumerate(text)
        if digit != "9"
    ]


def _smaller(text: str, is_integer: bool, places: int | None = None) -> list[str]:
    result = []
    for at, digit in enumerate(text):
        least = 1 if is_integer and at == 0 and len(text) > 1 else 0
        if int(digit) > least:
            result.append(f"{text[:at]}[{least}-{int(digit) - 1}]{_rest(text, at, places)}")
    return result


def _rest(text: str, at: int, places: int | None) -> str:
    if places is None:
        return f"{_DIGIT}{{{len(text) - at - 1}}}"
    return _more(places - at - 1)
