"""Loader of settings, which merges mappings (layers) and returns frozen dataclasses. Pure.

    defaults (in the dataclasses) <- YAML mapping <- environment <- --set worker.max_num_seqs=8

Each layer overrides those to its left, and pydantic validates the result. The type of a setting is
its field's annotation: str, int, float, bool, Path, or an Enum or Literal of strings. Lists and
optional values of such a type X are tuple[X, ...] and X | None. A field whose type is another
dataclass is a section of settings. A field of type Mapping[str, X], where X is a dataclass,
contains sections that the user names. The range of a setting is a pydantic Field in the annotation
(``Port``, ``Count``, ...).

All invalid settings are reported together. The error gives the most similar key for an unknown key,
the expected type for a wrong type, and the bound for a value out of range.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_json

from everlift.errors import SettingsError

ENVIRONMENT_PREFIX = "EVERLIFT_"
_NESTING = "__"
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True)
_BOOLEANS |= dict.fromkeys(("false", "no", "off", "0"), False)
_NONE = frozenset({"", "none", "null"})
#: Names of the scalar types in error messages.
_SCALARS: dict[type, str] = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}
_UNKNOWN_KEY = "unexpected_keyword_argument"
#: By pydantic's name of a range error: the comparison in words, and the context key of the bound.
_RANGES = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}

#: Configuration of pydantic's dataclasses. Errors do not show values, because these can be secret.
CHECKED = ConfigDict(hide_input_in_errors=True)

Port = Annotated[int, Field(ge=0, le=65535)]
#: Integer that is at least 1.
Count = Annotated[int, Field(ge=1)]
#: Integer that is at least 0.
Amount = Annotated[int, Field(ge=0)]
#: Finite number above 0; durations are in seconds.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: Finite number that is at least 0.
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
#: Fraction above 0 and at most 1.
Fraction = Annotated[float, Field(gt=0, le=1)]

T = TypeVar("T")


def load(
    cls: type[T],
    *layers: Mapping[str, object],
    location_of: Callable[[str], str] = lambda path: "",
    copies: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Return an instance of the dataclass ``cls`` with the settings in ``layers``.

    Each layer is a nested mapping, and overrides those before it. ``location_of`` is called with
    the dotted path of an invalid setting, and returns the text that precedes the path in the error,
    such as the file and line. ``copies`` has the paths of settings that are copies as keys, and the
    paths of their originals as values. An invalid copy is not reported if its original is invalid
    too.

    Raises SettingsError, which lists the invalid settings. Missing settings are listed only if
    there is no other error. The check of a dataclass (``__post_init__``) runs only if each setting
    of the dataclass is valid by itself, and reports only its first problem.
    """
    merged = merge(*layers)
    # The settings are validated as JSON. In this mode pydantic converts lists to tuples and texts
    # to paths, but no other types.
    data = to_json(merged, inf_nan_mode="constants", fallback=str)
    try:
        return cast(T, _adapter(cast(Any, cls)).validate_json(data, strict=True, extra="forbid"))
    except ValidationError as error:
        raise to_settings_error(cls, error, location_of, list(paths(merged)), copies) from None


def paths(values: Mapping[str, object], section: str = "") -> Iterator[str]:
    """Yield the dotted path of each section and each setting in nested ``values``.

    The path of a section is yielded before the paths in it. Each path begins with ``section``,
    which is empty or ends with a dot.
    """
    for name, value in values.items():
        yield f"{section}{name}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{section}{name}.")


def to_settings_error(
    cls: type,
    error: ValidationError,
    location_of: Callable[[str], str] = lambda path: "",
    order: Sequence[str] = (),
    copies: Mapping[str, str] = MappingProxyType({}),
) -> SettingsError:
    """Return a SettingsError for pydantic's ``error`` about the dataclass ``cls``.

    The error's message has one line per problem, sorted by the position of the setting's path in
    ``order``; paths that are not in ``order`` come last. ``location_of`` is called with a setting's
    dotted path, and returns the text with which the line begins. ``copies`` is that of ``load``,
    which also describes the problems that are omitted.
    """
    keys, problems = Keys(cls), _Problems(location_of)
    details = error.errors()
    # Missing keys are reported only if there is no other error, because a misspelt key is reported
    # as unknown already.
    unknown = [detail for detail in details if detail["type"] == _UNKNOWN_KEY]
    others = [detail for detail in details if detail["type"] not in (_UNKNOWN_KEY, "missing")]
    found = [_problem(cls, keys, detail) for detail in [*unknown, *others] or details]
    positions = {path: position for position, path in enumerate(order)}
    wrong = {path for path, _ in found}
    for path, problem in sorted(found, key=lambda each: positions.get(each[0], len(order))):
        if copies.get(path) not in wrong:
            problems.add(path, problem)
    return problems.error


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _problem(cls: type, keys: Keys, detail: ErrorDetails) -> tuple[str, SettingsError]:
    """Return the dotted path of an invalid setting, and the error that describes it.

    The error's message begins with the path.
    """
    path, hint = "", cast(Any, cls)
    for name in detail["loc"]:
        if isinstance(name, str) and is_dataclass(hint):
            path, hint = f"{path}.{name}".lstrip("."), get_type_hints(cast(type, hint)).get(name)
        elif isinstance(name, str) and (section_type := _named_section(hint)):
            path, hint = f"{path}.{name}", section_type
        elif isinstance(name, int) and hint is not None:
            hint = _inner(hint)
    kind, value = detail["type"], detail["input"]
    if kind == _UNKNOWN_KEY:
        return path, keys.unknown(path)
    if kind == "missing":
        return path, SettingsError(f"{path}: must be set")
    if kind == "value_error":
        # A dataclass's own check raised it. Its message begins with the setting's name.
        text = str(detail["ctx"]["error"])
        section = f"{path}." if path else ""
        return section + text.partition(" ")[0].rstrip(":,"), SettingsError(f"{section}{text}")
    if kind in _RANGES:
        must_be, bound = _RANGES[kind]
        limit = detail["ctx"][bound]
        return path, SettingsError(f"{path} must be {must_be} {limit:g}, not {value:g}")
    if kind == "finite_number":
        return path, SettingsError(f"{path} must be a finite number, not {value:g}")
    return path, _wrong_type(path, hint, value)


def _wrong_type(path: str, hint: Any, value: object) -> SettingsError:
    if is_dataclass(hint) or _named_section(hint):
        return SettingsError(f"{path}: must be a section of settings, not {value!r}")
    hint = _inner(hint) if _is_optional(hint) else hint
    return SettingsError(f"{path}: must be {_describe(hint)}, not {value!r}{_nearest(hint, value)}")


class _Problems:
    def __init__(self, location_of: Callable[[str], str] = lambda path: "") -> None:
        self._location_of = location_of
        self._lines: list[str] = []

    def add(self, path: str, error: Exception) -> None:
        """Add the message of ``error``, which is about the setting with the dotted path ``path``.

        The text that ``location_of`` returns for ``path`` precedes the message in its line.
        """
        self._lines.append(f"{self._location_of(path)}{error}")

    @property
    def error(self) -> SettingsError:
        return SettingsError("\n".join(self._lines))

    def check(self) -> None:
        if self._lines:
            raise self.error


def from_environment(
    cls: type, environ: Mapping[str, str], ignore: Collection[str] = ()
) -> dict[str, object]:
    """Return the settings in the EVERLIFT_ variables of ``environ``, as a mapping for ``load``.

    The mapping is nested: EVERLIFT_WORKER__MAX_NUM_SEQS=8 gives {"worker": {"max_num_seqs": 8}}.
    ``cls`` is the dataclass of the settings. Variables named in ``ignore`` are skipped. Raises
    SettingsError, which lists all unknown settings and all values of a wrong type.
    """
    keys, problems = Keys(cls), _Problems()
    layer: dict[str, object] = {}
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in ignore:
            path = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace(_NESTING, ".")
            try:
                if path not in keys:
                    raise keys.unknown(path, spell=_variable)
                _set_at(layer, path, _parse(keys[path], environ[name], name))
            except SettingsError as error:
                problems.add(path, error)
    problems.check()
    return layer


def from_flags(cls: type, assignments: Iterable[str]) -> dict[str, object]:
    """Return the settings in ``assignments``, as a nested mapping for ``load``.

    The assignment "worker.max_num_seqs=8" gives {"worker": {"max_num_seqs": 8}}. ``cls`` is the
    dataclass of the settings. Raises SettingsError, which lists all unknown settings, all values
    of a wrong type, and all assignments without "=".
    """
    keys, problems = Keys(cls), _Problems()
    layer: dict[str, object] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        try:
            if not equals:
                raise SettingsError(f"{assignment}: must be key=value")
            if path not in keys:
                raise keys.unknown(path)
            _set_at(layer, path, _parse(keys[path], text, path))
        except SettingsError as error:
            problems.add(path, error)
    problems.check()
    return layer


def to_dict(settings: object) -> dict[str, object]:
    """Return the settings of a dataclass as a nested dict, from which ``load`` restores it."""
    assert is_dataclass(settings)
    return {field.name: _plain(getattr(settings, field.name)) for field in fields(settings)}


def _plain(value: object) -> object:
    match value:
        case Enum():
            return value.value
        case Path():
            return str(value)
        case tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return {name: _plain(item) for name, item in value.items()}
        case _:
            return to_dict(value) if is_dataclass(value) else value


class Keys:
    """Types of all settings of a dataclass, by the dotted paths of the settings.

    A field of type Mapping[str, X], where X is a dataclass, contains sections that the user names.
    A path may contain any name for such a section.
    """

    def __init__(self, cls: type) -> None:
        #: types by path, with "*" in place of a name that the user chooses
        self._types = dict(_leaves(cls, section=""))

    def __contains__(self, path: str) -> bool:
        return path in self._named_as(path)

    def __getitem__(self, path: str) -> Any:
        return self._named_as(path)[path]

    def unknown(self, path: str, spell: Callable[[str], str] = str) -> SettingsError:
        """Return the error to raise for a ``path`` that is not the path of a setting.

        ``spell`` converts a path to the form in which the user writes it.
        """
        if any(key.startswith(f"{path}.") for key in self._named_as(path)):
            return SettingsError(f"{spell(path)}: is a section; only its keys can be set")
        near = self._nearest(path)
        hint = f"; did you mean {spell(near)}?" if near else ""
        return SettingsError(f"{spell(path)}: unknown key{hint}")

    def _nearest(self, path: str) -> str | None:
        """Return the key or section that is most similar to ``path``, or None.

        Similar keys in the same section are preferred, then keys of the same name in other
        sections, then similar keys anywhere.
        """
        section, dot, name = path.rpartition(".")
        prefix, keys = section + dot, self._named_as(path)
        beside = {
            prefix + key.removeprefix(prefix).partition(".")[0]
            for key in keys
            if key.startswith(prefix)
        }
        namesakes = [key for key in keys if key.rpartition(".")[2] == name]
        near = get_close_matches(path, sorted(beside), 1, 0.75) or namesakes
        return next(iter(near or get_close_matches(path, keys, 1)), None)

    def _named_as(self, path: str) -> Mapping[str, Any]:
        """Return the types of all settings by path, with a name in place of the "*" in a path.

        The "*" stands for a section that the user names. The name is the one at the same place in
        ``path``, or NAME if ``path`` does not lead to that place.
        """
        return {_named_key(key, path): hint for key, hint in self._types.items()}


def _named_key(key: str, path: str) -> str:
    section, star, rest = key.partition("*")
    is_below = star and path.startswith(section)
    name = path.removeprefix(section).partition(".")[0] if is_below else "NAME"
    return f"{section}{name}{rest}" if star else key


def _variable(path: str) -> str:
    return ENVIRONMENT_PREFIX + path.replace(".", _NESTING).upper()


def _leaves(cls: type, section: str) -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(cls).items():
        if is_dataclass(hint):
            yield from _leaves(cast(type, hint), f"{section}{name}.")
        elif section_type := _named_section(hint):
            yield from _leaves(section_type, f"{section}{name}.*.")
        else:
            yield f"{section}{name}", hint


def merge(*layers: Mapping[str, object]) -> dict[str, object]:
    """Return the nested mapping of all ``layers``, of which each overrides those before it."""
    merged: dict[str, object] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            if isinstance(old, Mapping) and isinstance(value, Mapping):
                merged[key] = merge(old, value)
            else:
                merged[key] = value
    return merged


def _set_at(layer: dict[str, object], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        layer = cast(dict[str, object], layer.setdefault(section, {}))
    layer[name] = value


def _parse(hint: Any, text: str, at: str) -> object:
    """Return ``text`` as a bool, number, list, str or None, for a setting of type ``hint``.

    Raises SettingsError if ``text`` is not a value of this type. The error's message begins with
    ``at``, the name of the setting.
    """
    plain = _read(hint, text)
    try:
        data = to_json(plain, inf_nan_mode="constants")
        _adapter(hint).validate_json(data, strict=True)
    except ValidationError as error:
        [detail, *_] = error.errors()
        hint = _inner(hint) if detail["loc"] else hint
        raise _wrong_type(at, hint, detail["input"]) from None
    return plain


def _read(hint: Any, text: str) -> object:
    """Return ``text`` as a bool, number, list or None, as the type ``hint`` of a setting requires.

    Types such as str, Path and Enum remain text, and so does any text that cannot be converted:
    the caller has to validate the result. Items of a list are separated by commas.
    """
    if _is_optional(hint):
        return None if text.lower() in _NONE else _read(_inner(hint), text)
    if get_origin(hint) is tuple:
        return [_read(_inner(hint), item.strip()) for item in text.split(",")] if text else []
    if hint is bool:
        return _BOOLEANS.get(text.lower(), text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            return text
    return text


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _named_section(hint: Any) -> type | None:
    """Return the dataclass X if ``hint`` is Mapping[str, X], else None."""
    if get_origin(hint) is not Mapping:
        return None
    _, inner = get_args(hint)
    return cast(type, inner) if is_dataclass(inner) else None


def _inner(hint: Any) -> Any:
    """Return the type X of a ``hint`` that is either ``X | None`` or ``tuple[X, ...]``."""
    return next(arg for arg in get_args(hint) if arg is not type(None))


def _nearest(hint: Any, value: object) -> str:
    """Return "; did you mean NAME?" for the allowed name that is most similar to ``value``.

    Returns "" if no allowed name is similar enough, or if ``value`` is not a string.
    """
    near = get_close_matches(value, _names(hint), 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]}?" if near else ""


def _names(hint: Any) -> tuple[str, ...]:
    """Return the names that ``hint`` allows, or () if it is not a choice between names."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(member.value for member in hint)
    return ()


def _describe(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a list, each {_describe(_inner(hint))}"
    if is_dataclass(hint):
        return "a section of settings"
    if names := _names(hint):
        return f"one of {', '.join(names)}"
    return _SCALARS[hint]
