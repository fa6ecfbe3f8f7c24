"""proto/README.md says what is held."""

from __future__ import annotations

from pathlib import Path

import pytest

from everlift.messages import (
    MAX_CACHE_SALT_BYTES,
    MAX_LABEL_BYTES,
    MAX_N,
    MAX_PRIORITY,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TIMEOUT_S,
)
from everlift.sampling import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS, MAX_LOGPROBS
from router.config import RouterConfig
from router.gateway import model
from router.gateway.many import MAX_REQUESTS
from router.rpc.limits import Limits

README = Path(__file__).resolve().parents[2] / "proto" / "README.md"
CHARACTERS = model._MAX_CHARACTERS_PER_TOKEN
LIMITS = Limits()


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """What is at most, by what it is of."""
    table = README.read_text().partition("## Limits")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {first.removeprefix("| "): most for first, most, *_ in cells}


@pytest.mark.parametrize(
    ("row", "most"),
    [
        ("a message, uncompressed", f"{RouterConfig().max_message_bytes >> 20} MiB"),
        (
            "a call's metadata, 32 bytes counted beside each",
            f"{LIMITS.max_metadata_bytes >> 10} KiB",
        ),
        ("requests of a `GenerateMany`", f"{MAX_REQUESTS}"),
        ("a prompt", f"{CHARACTERS} characters"),
        ("text of a `Tokenize`", f"{CHARACTERS} characters"),
        ("`n`", f"{MAX_N}"),
        ("`stop`", f"{MAX_STOP_STRINGS} strings of {MAX_STOP_BYTES} bytes"),
        ("`stop_token_ids`", f"{MAX_STOP_TOKEN_IDS}"),
        ("`logit_bias`", f"{MAX_LOGIT_BIAS} tokens"),
        ("`grammar`", f"{MAX_GRAMMAR_BYTES} bytes, and {MAX_CHOICES} texts"),
        ("`logprobs`, `prompt_logprobs`", f"{MAX_LOGPROBS} alternatives"),
        ("`logprobs`, `prompt_logprobs`", f"{model._MAX_LOGPROBS} values of a request's output"),
        ("`logprobs`, `prompt_logprobs`", f"{model._MAX_PROMPT_LOGPROBS} of its prompt"),
        ("`timeout_ms`, `ttft_target_ms`", f"{MAX_TIMEOUT_S:.0f} s"),
        ("`priority`", f"from -{MAX_PRIORITY} to {MAX_PRIORITY}"),
        ("`cache_salt`", f"{MAX_CACHE_SALT_BYTES} bytes"),
        ("`session_id`, `fairness_id`", f"{MAX_LABEL_BYTES} bytes"),
        ("choices of an `Attach`", f"{MAX_N}"),
        ("calls of a connection at a time", f"{LIMITS.max_streams}"),
        ("connections of a router", f"{LIMITS.max_connections}"),
    ],
)
def test_the_table_has_the_limit(rows: dict[str, str], row: str, most: str) -> None:
    assert most in rows[row]
