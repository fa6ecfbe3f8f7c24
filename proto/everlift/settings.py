"""The one loader of settings: frozen dataclasses from layers of plain values. Pure.

    defaults (in the dataclasses) <- YAML mapping <- environment <- --set worker.max_num_seqs=8

A setting's type is its field's annotation: str, int, float, bool, Path, an Enum (written as its
member's name in lower case), a Literal of strings, tuple[X, ...], X | None, or another dataclass,
whose settings form a section. A key that no field has is an error that names the nearest one; a
value of another type is an error that says what it should be, and of several names the nearest one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

ENVIRONMENT_PREFIX = "EVERLIFT_"
_NESTING = "__"
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True)
_BOOLEANS |= dict.fromkeys(("false", "no", "off", "0"), False)
_NONE = frozenset({"", "none", "null"})
#: What a scalar accepts, and what it is called in errors.
_SCALARS: dict[type, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    Path: ((str, Path), "a path"),
}

T = TypeVar("T")


class SettingsError(Exception):
    """Settings that cannot be. Each has a line, which begins with where it is set, if that is
    known, and its path."""


def load(
    cls: type[T], *layers: Mapping[str, object], where: Callable[[str], str] = lambda path: ""
) -> T:
    """A ``cls`` from nested mappings, each laid over those before it.

    ``where`` returns what comes before the path of a wrong setting, the file and line that set it
    for example. Raises SettingsError for all wrong settings.
    """
    merged: Mapping[str, object] = {}
    for layer in layers:
        merged = _merge(merged, layer)
    problems = _Problems(where)
    loaded = _build(cls, merged, Keys(cls), "", problems)
    problems.check()
    assert loaded is not None
    return loaded


class _Problems:
    """Settings that are wrong, all of which are reported together."""

    def __init__(self, where: Callable[[str], str] = lambda path: "") -> None:
        self._where = where
        self._lines: list[str] = []

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, path: str, error: Exception) -> None:
        """``error`` begins with the path."""
        self._lines.append(f"{self._where(path)}{error}")

    def check(self) -> None:
        if self._lines:
            raise SettingsError("\n".join(self._lines))


def from_environment(
    cls: type, environ: Mapping[str, str], ignore: Collection[str] = ()
) -> dict[str, object]:
    """The layer that the EVERLIFT_ variables make, e.g. EVERLIFT_WORKER__MAX_NUM_SEQS=8.

    Variables named in ``ignore`` are no settings. Raises SettingsError.
    """
    keys, problems = Keys(cls), _Problems()
    layer: dict[str, object] = {}
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in ignore:
            path = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace(_NESTING, ".")
            try:
                if path not in keys:
                    raise keys.unknown(path, spell=_variable)
                _put(layer, path, _parse(keys[path], environ[name], name))
            except SettingsError as error:
                problems.add(path, error)
    problems.check()
    return layer


def from_flags(cls: type, assignments: Iterable[str]) -> dict[str, object]:
    """The layer that assignments such as ``worker.max_num_seqs=8`` make. Raises SettingsError."""
    keys, problems = Keys(cls), _Problems()
    layer: dict[str, object] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        try:
            if not equals:
                raise SettingsError(f"{assignment}: must be key=value")
            if path not in keys:
                raise keys.unknown(path)
            _put(layer, path, _parse(keys[path], text, path))
        except SettingsError as error:
            problems.add(path, error)
    problems.check()
    return layer


def to_dict(settings: object) -> dict[str, object]:
    """A dataclass as JSON-ready values. ``load`` makes an equal one of the result."""
    assert is_dataclass(settings)
    return {field.name: _plain(getattr(settings, field.name)) for field in fields(settings)}


def _plain(value: object) -> object:
    match value:
        case Enum():
            return value.name.lower()
        case Path():
            return str(value)
        case tuple():
            return [_plain(item) for item in value]
        case _:
            return to_dict(value) if is_dataclass(value) else value


class Keys:
    """Every settable key of a dataclass by its dotted path, with its type."""

    def __init__(self, cls: type) -> None:
        self._types = dict(_leaves(cls, section=""))

    def __contains__(self, path: str) -> bool:
        return path in self._types

    def __getitem__(self, path: str) -> Any:
        return self._types[path]

    def unknown(self, path: str, spell: Callable[[str], str] = str) -> SettingsError:
        """The error that ``path`` is, which names no key; ``spell`` is how paths are written."""
        if any(key.startswith(f"{path}.") for key in self._types):
            return SettingsError(f"{spell(path)}: is a section, only its keys can be set")
        near = self._nearest(path)
        hint = f"; did you mean {spell(near)}?" if near else ""
        return SettingsError(f"{spell(path)}: unknown key{hint}")

    def _nearest(self, path: str) -> str | None:
        """The key or section most like ``path``: beside it, else of its name, else anywhere."""
        section, dot, name = path.rpartition(".")
        prefix = section + dot
        beside = {
            prefix + key.removeprefix(prefix).partition(".")[0]
            for key in self._types
            if key.startswith(prefix)
        }
        namesakes = [key for key in self._types if key.rpartition(".")[2] == name]
        near = get_close_matches(path, sorted(beside), 1, 0.75) or namesakes
        return next(iter(near or get_close_matches(path, self._types, 1)), None)


def _variable(path: str) -> str:
    return ENVIRONMENT_PREFIX + path.replace(".", _NESTING).upper()


def _leaves(cls: type, section: str) -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(cls).items():
        if is_dataclass(hint):
            yield from _leaves(cast(type, hint), f"{section}{name}.")
        else:
            yield f"{section}{name}", hint


def _merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _put(layer: dict[str, object], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        layer = cast(dict[str, object], layer.setdefault(section, {}))
    layer[name] = value


def _build(
    cls: type[T], values: Mapping[str, object], keys: Keys, section: str, problems: _Problems
) -> T | None:
    """A ``cls``, or None where ``problems`` have grown; the keys of ``values`` stand in
    ``section``, which is empty or ends with a dot."""
    before = len(problems)
    hints = get_type_hints(cls)
    given: dict[str, object] = {}
    for key, value in values.items():
        path = f"{section}{key}"
        try:
            if key not in hints:
                raise keys.unknown(path)
            given[key] = _setting(hints[key], value, keys, path, problems)
        except SettingsError as error:
            problems.add(path, error)
    if len(problems) == before:
        for name in sorted(_required(cls) - values.keys()):
            problems.add(f"{section}{name}", SettingsError(f"{section}{name}: must be set"))
    if len(problems) > before:
        return None
    try:
        return cls(**given)
    except ValueError as error:
        # It begins with the setting's name.
        name = str(error).partition(" ")[0].rstrip(":,")
        problems.add(f"{section}{name}", SettingsError(f"{section}{error}"))
        return None


def _required(cls: type) -> set[str]:
    return {
        field.name
        for field in fields(cls)
        if field.default is MISSING and field.default_factory is MISSING
    }


def _setting(hint: Any, value: object, keys: Keys, at: str, problems: _Problems) -> object:
    if not is_dataclass(hint):
        return _value(hint, value, at)
    if not isinstance(value, Mapping):
        raise SettingsError(f"{at}: must be a section of settings, not {value!r}")
    return _build(cast(type, hint), value, keys, f"{at}.", problems)


def _value(hint: Any, value: object, at: str) -> object:
    """``value`` as its field takes it. Raises SettingsError."""
    if _is_optional(hint):
        return None if value is None else _value(_inner(hint), value, at)
    if get_origin(hint) is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_value(_inner(hint), item, at) for item in value)
    elif get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
    elif issubclass(hint, Enum):
        for member in hint:
            if value == member.name.lower():
                return member
    elif isinstance(value, _SCALARS[hint][0]) and (hint is bool or not isinstance(value, bool)):
        return hint(value)
    raise SettingsError(f"{at}: must be {_describe(hint)}, not {value!r}{_nearest(hint, value)}")


def _parse(hint: Any, text: str, at: str) -> object:
    """What ``text`` would be in YAML. Raises SettingsError if its field does not take that."""
    plain = _read(hint, text)
    _value(hint, plain, at)
    return plain


def _read(hint: Any, text: str) -> object:
    """``text`` as a plain value, or as it is where its type takes no such text."""
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


def _inner(hint: Any) -> Any:
    """The X of ``X | None`` and of ``tuple[X, ...]``."""
    return next(arg for arg in get_args(hint) if arg is not type(None))


def _nearest(hint: Any, value: object) -> str:
    """Where it is one of several names, the one most like ``value``, as a question."""
    near = get_close_matches(value, _names(hint), 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]}?" if near else ""


def _names(hint: Any) -> tuple[str, ...]:
    """None where it may be anything else."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(member.name.lower() for member in hint)
    return ()


def _describe(hint: Any) -> str:
    if _is_optional(hint):
        return f"{_describe(_inner(hint))} or nothing"
    if get_origin(hint) is tuple:
        return f"a list, each {_describe(_inner(hint))}"
    if names := _names(hint):
        return f"one of {', '.join(names)}"
    return _SCALARS[hint][1]
