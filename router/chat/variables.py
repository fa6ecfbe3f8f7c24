"""What a client may set in a template beside messages and tools. Pure.

Switches such as enable_thinking. A name that means something to transformers, or to any template,
is not the client's to set: such names chose the template itself, or what becomes of its text, in
other servers (CVE-2025-61620, CVE-2025-62426).
"""

from __future__ import annotations

import re

from everlift.errors import InvalidRequest
from router.chat.checks import check_json

Variables = dict[str, bool | int | float | str]

MAX_VARIABLES = 16
MAX_BYTES = 4096
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_RESERVED = frozenset(
    # of transformers' functions
    {"chat_template", "conversation", "conversations", "documents", "messages", "tools"}
    | {"add_generation_prompt", "continue_final_message", "sanitize_control_tokens"}
    | {"padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict"}
    | {"return_tensors", "max_length", "tokenize", "tokenizer_kwargs", "truncation", "kwargs"}
    # of its environment, and of Jinja's
    | {"cycler", "dict", "joiner", "lipsum", "namespace", "raise_exception", "range"}
    | {"caller", "context", "environment", "loop", "self", "strftime_now", "varargs"}
)
#: bos_token and the like are the model's own.
_SPECIAL = re.compile(r".*_tokens?(_id)?")


def checked(given: object) -> Variables:
    """Raises InvalidRequest, OutOfRange, NotUtf8."""
    if not isinstance(given, dict):
        raise InvalidRequest("chat_template_kwargs must be an object")
    if len(given) > MAX_VARIABLES:
        raise InvalidRequest(f"chat_template_kwargs has more than {MAX_VARIABLES} names")
    check_json("chat_template_kwargs", given, MAX_BYTES)
    for name, value in given.items():
        _check(name, value)
    return given


def _check(name: str, value: object) -> None:
    if not _NAME.fullmatch(name) or name in _RESERVED or _SPECIAL.fullmatch(name):
        raise InvalidRequest(f"chat_template_kwargs may not set {name[:64]}")
    if not isinstance(value, bool | int | float | str):
        raise InvalidRequest(f"chat_template_kwargs.{name} must be a text, a number, true or false")
