"""Chat templates and special tokens of a checkpoint, read from its directory."""

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
    """Chat templates of a model, which are texts in Jinja's language.

    ``tool_use`` renders chats with tools; it equals ``default`` if the model has no template for
    them. ``special_tokens`` maps the names that templates use, such as bos_token, to the tokens'
    texts.
    """

    default: str
    tool_use: str
    special_tokens: Mapping[str, str]

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Return the templates of the model in ``directory``, or None if it has none.

        The first file with a template is used, in the order chat_template.jinja,
        chat_template.json, tokenizer_config.json. Raises UnknownModel for a malformed or unreadable
        file.
        """
        jinja = directory / "chat_template.jinja"
        given = _text(jinja) if jinja.is_file() else None
        given = given or read_object(directory / "chat_template.json").get("chat_template")
        given = given or read_object(directory / "tokenizer_config.json").get("chat_template")
        if not given:
            return None
        by_name = _templates_by_name(directory, given)
        return cls(
            default=by_name["default"],
            tool_use=by_name.get("tool_use", by_name["default"]),
            special_tokens=special_tokens(directory),
        )


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of the tokenizer's special tokens by name, such as eos_token.

    The tokens are read from special_tokens_map.json and tokenizer_config.json. If both files have a
    token, the latter's text is used. Raises UnknownModel for a malformed or unreadable file.
    """
    tokens: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        given = read_object(directory / file)
        tokens |= {name: text for name in _SPECIAL_TOKENS if (text := _token(given.get(name)))}
    return tokens


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``, or an empty one if the file does not exist.

    Raises UnknownModel if the file cannot be read, or has other content.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise UnknownModel(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnknownModel(f"{path} is not a JSON object")
    return found


def _templates_by_name(directory: Path, template: Any) -> dict[str, str]:
    if isinstance(template, str):
        return {"default": template}
    try:
        by_name = {str(one["name"]): str(one["template"]) for one in template}
        return {"default": by_name["default"], **by_name}
    except (TypeError, KeyError):
        raise UnknownModel(f"the chat templates in {directory} have no default") from None


def _token(value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownModel(f"{path} cannot be read: {error}") from None
