"""End tokens of a checkpoint: the tokens with which its model ends an output.

The router adds them to the stop tokens of each request that does not set ignore_eos. In an output
that a grammar constrains, the worker allows them only when the output is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from everlift.chat_templates import Templates, read_object, special_tokens
from everlift.errors import UnknownModel

_KEY = "eos_token_id"
#: Names of end-of-turn tokens, in lower case and without brackets and separators: <|im_end|>
#: becomes imend.
_END_OF_TURN = frozenset(
    {"imend", "end", "eot", "eotid", "eom", "eomid", "eos", "/s", "return"}
    | {"endofturn", "endofturntoken", "endturn", "turnend", "endofmessage", "endofassistant"}
    | {"endoftext", "endofsentence", "endofutterance"}
)
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9/]")


def end_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the ids of the end tokens of the model in ``directory``, each once.

    The set is the union of the ids in generation_config.json (or, if it names none, in
    config.json), the tokenizer's eos_token, and the tokens that end a turn in the chat template.
    A null in a file counts as absent. Raises UnknownModel for a malformed file.
    """
    configured = _configured(directory)
    tokenizer = read_object(directory / "tokenizer.json")
    added = {
        token["content"]: token["id"]
        for token in tokenizer.get("added_tokens") or ()
        if isinstance(token, dict) and {"content", "id"} <= token.keys()
    }
    ids = [
        *configured,
        *_eos_token(directory, tokenizer, added),
        *_end_of_turn_tokens(directory, added),
    ]
    return tuple(dict.fromkeys(ids))


def _configured(directory: Path) -> tuple[int, ...]:
    """Return the end-token ids of the first configuration section that has any; () if none has.

    The sections are generation_config.json, config.json and its text_config, in this order. Raises
    UnknownModel for invalid ids.
    """
    generation, config = directory / "generation_config.json", directory / "config.json"
    facts = read_object(config)
    text = facts.get("text_config")
    sections = (
        (generation, read_object(generation)),
        (config, facts),
        (config, text if isinstance(text, dict) else {}),
    )
    return next((ids for path, section in sections if (ids := _ids(path, section))), ())


def _ids(path: Path, section: Mapping[str, Any]) -> tuple[int, ...]:
    given = section.get(_KEY)
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in ids):
        raise UnknownModel(f"{path}: {_KEY} must be a token id or a list of them, not {given!r}")
    return tuple(ids)


def _eos_token(
    directory: Path, tokenizer: Mapping[str, Any], added: Mapping[str, int]
) -> Iterator[int]:
    """Yield the id of the tokenizer's eos_token, if its vocabulary has that token."""
    if (text := special_tokens(directory).get("eos_token")) is None:
        return
    if text in added:
        yield added[text]
        return
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict) and text in vocabulary:
        yield vocabulary[text]
    elif isinstance(vocabulary, list):  # pairs of a piece and its score, in the order of the ids
        yield from (index for index, (piece, _) in enumerate(vocabulary) if piece == text)


def _end_of_turn_tokens(directory: Path, added: Mapping[str, int]) -> Iterator[int]:
    """Yield the ids of added tokens in the chat template whose names mark the end of a turn.

    Only listed names count, because a wrong end token would cut outputs short.
    """
    if (templates := Templates.read(directory)) is None:
        return
    source = templates.default + templates.tool_use
    for text, index in added.items():
        name = _NOT_IN_A_NAME.sub("", text.lower())
        # In gpt-oss, <|return|> ends a turn, and <|end|> ends a message within the turn.
        ends_message = name == "end" and "<|return|>" in added
        if name in _END_OF_TURN and not ends_message and text in source:
            yield index
