"""Regular expressions of the string formats that are enforced. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from worker.grammar import patterns

#: There is no year 0 in the calendars of Python and SQL.
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    f"{_YEAR}"
    "-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
#: Python's timedelta has room for as many years.
_COUNT = "[0-9]{1,6}"
_DAY_TIME = f"T({_COUNT}H({_COUNT}M({_COUNT}S)?)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_H16 = "[0-9a-fA-F]{1,4}"
_HEX = "[0-9a-fA-F]"
_URI_CHARACTER = r"([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"

_EXPRESSIONS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_COUNT}W|{_COUNT}Y({_COUNT}M({_COUNT}D)?)?({_DAY_TIME})?"
    f"|{_COUNT}M({_COUNT}D)?({_DAY_TIME})?|{_COUNT}D({_DAY_TIME})?|{_DAY_TIME})",
    "email": r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*" + f"@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": f"({_H16}(:{_H16}){{7}}|({_H16}(:{_H16}){{0,5}})?::({_H16})?)",
    "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_URI_CHARACTER}+"
    rf"(\?({_URI_CHARACTER}|\?)*)?(#({_URI_CHARACTER}|\?)*)?",
}
#: By name. Other formats are annotations, as they are in JSON Schema.
FORMATS: Mapping[str, patterns.Node] = {
    name: patterns.whole(patterns.parse(expression)) for name, expression in _EXPRESSIONS.items()
}
