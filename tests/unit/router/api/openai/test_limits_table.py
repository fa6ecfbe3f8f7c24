"""proto/LIMITS.md states the limits in effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everlift.checks import check_range
from everlift.errors import BY_SLUG, OutOfRange
from everlift.images import MAX_IMAGES, MAX_PIXELS, MAX_PIXELS_OF_REQUEST, MAX_SIDE
from everlift.messages import (
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_BYTES,
    MAX_LABEL_BYTES,
    MAX_N,
    MAX_PRIORITY,
    MAX_REQUESTS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TIMEOUT_S,
)
from everlift.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BANNED_SEQUENCE_TOKENS,
    MAX_BANNED_SEQUENCES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
)
from router.api import chat_renderer
from router.api.http import body, connection, endpoint, server
from router.api.http2 import Limits
from router.api.kserve.infer_stream import MAX_CONCURRENT
from router.api.openai import fields, submissions
from router.chat import messages, tools
from router.config import RouterConfig
from router.requests import submission, tokenizer

PAGE = Path(__file__).resolve().parents[5] / "proto" / "LIMITS.md"
CHARACTERS = tokenizer._MAX_CHARACTERS_PER_TOKEN
LIMITS = Limits()


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """Return the second column of the table by the first one: the limit of each thing."""
    return {first: most for first, most, _ in table()}


def table() -> list[list[str]]:
    text = PAGE.read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize(
    ("row", "most"),
    [
        # over gRPC
        ("a message, uncompressed", f"{RouterConfig().max_message_bytes >> 20} MiB"),
        (
            "a call's metadata, 32 bytes counted beside each",
            f"{LIMITS.max_metadata_bytes >> 10} KiB",
        ),
        ("requests of a `GenerateMany`", f"{MAX_REQUESTS}"),
        ("requests of a KServe stream at a time", f"{MAX_CONCURRENT}"),
        ("choices of an `Attach`", f"{MAX_N}"),
        ("calls of a connection at a time", f"{LIMITS.max_streams}"),
        ("connections of a router", f"{LIMITS.max_connections}"),
        ("a connection without calls", f"{LIMITS.idle:.0f} s"),
        ("a client that says nothing, not even to a ping", f"{2 * LIMITS.keepalive:.0f} s"),
        # over any protocol
        ("text of a prompt or a `Tokenize`", f"{CHARACTERS} characters"),
        ("`n`", f"{MAX_N}"),
        ("`stop`", f"{MAX_STOP_STRINGS} strings of {MAX_STOP_BYTES} bytes"),
        ("`stop_token_ids`", f"{MAX_STOP_TOKEN_IDS}"),
        ("`logit_bias`", f"{MAX_LOGIT_BIAS} tokens"),
        ("`allowed_token_ids`", f"{MAX_ALLOWED_TOKENS}"),
        ("`bad_words`", f"{MAX_BAD_WORDS} of {MAX_BAD_WORD_BYTES} bytes"),
        (
            "`bad_words`",
            f"{MAX_BANNED_SEQUENCES} of {MAX_BANNED_SEQUENCE_TOKENS} tokens",
        ),
        (
            "`grammar`",
            f"{MAX_GRAMMAR_BYTES} bytes, and {MAX_CHOICES} texts",
        ),
        ("`logprobs`, `prompt_logprobs`", f"{MAX_LOGPROBS} alternatives"),
        (
            "`logprobs`, `prompt_logprobs`",
            f"{tokenizer._MAX_LOGPROBS} values of a request's output",
        ),
        ("`logprobs`, `prompt_logprobs`", f"{tokenizer._MAX_PROMPT_LOGPROBS} of its prompt"),
        ("`timeout_ms`, `ttft_target_ms`", f"{MAX_TIMEOUT_S:.0f} s"),
        ("`priority`", f"from -{MAX_PRIORITY} to {MAX_PRIORITY}"),
        ("`cache_salt`", f"{MAX_CACHE_SALT_BYTES} bytes"),
        ("`session_id`, `fairness_id`, `application`", f"{MAX_LABEL_BYTES} bytes"),
        ("`images`", f"{RouterConfig().max_images} by default and at most {MAX_IMAGES}"),
        ("`images`", f"{RouterConfig().max_image_bytes >> 20} MiB by default"),
        ("`images`", f"{MAX_PIXELS} pixels and a side of {MAX_SIDE} each"),
        ("`images`", f"{MAX_PIXELS_OF_REQUEST} pixels together"),
        (
            "images of a router's unfinished requests",
            f"{submission._MAX_IMAGE_BYTES >> 30} GiB",
        ),
        # over HTTP
        ("a body", f"{RouterConfig().max_body_bytes >> 20} MiB"),
        (
            "requests of a connection that have no answer yet",
            f"{connection._MAX_UNANSWERED}",
        ),
        ("a request line and its headers", f"{connection._MAX_HEAD_BYTES >> 10} KiB"),
        ("headers that are not whole", f"{connection._HEAD_TIMEOUT_S:.0f} s"),
        ("a body that is not whole", f"{endpoint._BODY_TIMEOUT_S:.0f} s"),
        ("levels of a body", f"{body.MAX_DEPTH}"),
        ("prompts of a body", f"{fields.MAX_PROMPTS}"),
        (
            "log probabilities of an answer that is not streamed",
            f"{submissions._MAX_UNSTREAMED_LOGPROBS} for all its prompts",
        ),
        (
            "log probabilities of a prompt in a stream",
            f"{submissions._MAX_STREAMED_PROMPT_LOGPROBS}, with alternatives",
        ),
        ("messages of a chat", f"{messages.MAX_MESSAGES}, of {messages.MAX_BYTES} bytes"),
        ("messages of a chat", f"`documents` {messages.MAX_BYTES} bytes"),
        ("`chat_template`", f"{chat_renderer.MAX_TEMPLATE_BYTES} bytes"),
        ("tools", f"{tools.MAX_TOOLS}, of {tools.MAX_TOOL_BYTES} bytes each"),
        ("tools", f"{tools.MAX_BYTES} together"),
        ("connections of a router", f"{connection._MAX_CONNECTIONS}"),
        ("a connection without requests", f"{server._IDLE_S} s"),
    ],
)
def test_limits_table_states_each_limit(rows: dict[str, str], row: str, most: str) -> None:
    assert most in rows[row]


def test_limits_table_names_known_error_slugs() -> None:
    named = {slug for *_, otherwise in table() for slug in re.findall(r"`(\w+)`", otherwise)}
    assert named <= BY_SLUG.keys()
    assert {cls.slug for cls in OutOfRange.__subclasses__()} <= named


@pytest.mark.parametrize(
    ("value", "low", "high", "message"),
    [
        (0, 1, 1 << 30, "it must be from 1 to 1073741824, not 0"),
        (2.5, -2.0, 2.0, "it must be from -2 to 2, not 2.5"),
    ],
)
def test_range_error_shows_every_digit_of_its_bounds(
    value: float, low: float, high: float, message: str
) -> None:
    with pytest.raises(OutOfRange, match=message):
        check_range("it", value, low, high)
