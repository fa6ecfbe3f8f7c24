"""A model's chat templates, as its directory has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from everlift.errors import UnknownModel

_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


@dataclass(frozen=True, slots=True)
class Templates:
    """``tool_use`` is the one for chats with tools. ``special_tokens`` are the texts by which
    templates know them, as bos_token."""

    default: str
    tool_use: str
    special_tokens: Mapping[str, str]

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Where a model has several of these files the first one counts, as for transformers. None:
        it has no template. Raises UnknownModel for files that are none."""
        config = _json(directory / "tokenizer_config.json")
        jinja = directory / "chat_template.jinja"
        given = _text(jinja) if jinja.is_file() else None
        given = given or _json(directory / "chat_template.json").get("chat_template")
        given = given or config.get("chat_template")
        if not given:
            return None
        by_name = _by_name(directory, given)
        tokens = _json(directory / "special_tokens_map.json") | config
        return cls(
            default=by_name["default"],
            tool_use=by_name.get("tool_use", by_name["default"]),
            special_tokens={
                name: text for name in _SPECIAL_TOKENS if (text := _token(tokens.get(name)))
            },
        )


def _by_name(directory: Path, given: Any) -> dict[str, str]:
    if isinstance(given, str):
        return {"default": given}
    try:
        by_name = {str(one["name"]): str(one["template"]) for one in given}
        return {"default": by_name["default"], **by_name}
    except (TypeError, KeyError):
        raise UnknownModel(f"the chat templates in {directory} have no default") from None


def _token(given: Any) -> str:
    text = given.get("content") if isinstance(given, dict) else given
    return text if isinstance(text, str) else ""


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise UnknownModel(f"{path} is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownModel(f"{path} cannot be read: {error}") from None
