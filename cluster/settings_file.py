"""Reader of a YAML file of settings, with the line of each setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from everlift.errors import SettingsError

if TYPE_CHECKING:
    import yaml


def read(file: Path) -> tuple[Mapping[str, object], Mapping[str, int]]:
    """Return the settings in ``file`` as nested mappings, and the line of each by its dotted path.

    Lines are counted from 1. Both mappings are empty for an empty file. Raises SettingsError if the
    file cannot be read, is not a YAML mapping, or sets a key twice.
    """
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        root, loaded = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        # PyYAML raises ValueError for an invalid date; an invalid encoding is one too.
        raise SettingsError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}, {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"{file}: must be a mapping of setting names to values")
    lines: dict[str, int] = {}
    twice: list[str] = []
    for path, line in _keys(root, ""):
        if path in lines:
            twice.append(f"{file}:{line}: {path}: is already set in line {lines[path]}")
        else:
            lines[path] = line
    if twice:
        raise SettingsError("\n".join(twice))
    return loaded, lines


def _keys(node: yaml.Node | None, section: str) -> Iterator[tuple[str, int]]:
    """Yield the dotted path and the line of each key in ``node`` and in the mappings within it.

    ``section`` precedes the paths; it is empty or ends with a dot.
    """
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            path = f"{section}{key.value}"
            yield path, key.start_mark.line + 1
            yield from _keys(value, f"{path}.")
