"""Every numeric field of a request has one range, which all fronts state in the same words."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.llm.llm import LLM
from everlift.errors import OutOfRange
from everlift.messages import RANGES
from everlift.options import GenerateOptions, submission_message
from router.api.http.fields import parse
from router.api.openai.fields import ChatFields
from tests.support.in_process import cluster
from tests.support.router.front_answers import FRONTS, Answer

#: Fields that a front lacks, or for which it has a range of its own: KServe's priority and timeout
#: are Triton's.
LACKS = {
    # Checked against the vocabulary instead: a message cannot hold other ids.
    "native": {"stop_token_ids"},
    "KServe": {"priority", "timeout_ms", "ttft_target_ms", "prompt_logprobs"},
    # The max_tokens of a completion may be 0.
    "HTTP": {"max_tokens"},
    "chat": {"best_of"},
    "options": {"best_of", "timeout_ms", "ttft_target_ms"},
}


def beyond(field: str) -> tuple[float, float]:
    """Return a value below and a value above the range."""
    valid = RANGES[field]
    if isinstance(valid.low, int):
        return valid.low - 1, valid.high + 1
    return valid.low if valid.exclusive_low else valid.low - 0.5, valid.high + 0.5


def given(field: str, value: float) -> dict[str, Any]:
    return {field: [value] if field == "stop_token_ids" else value}


def beyond_all(front: str) -> list[tuple[str, float]]:
    fields = [field for field in RANGES if field not in LACKS[front]]
    return [(field, value) for field in fields for value in beyond(field)]


@pytest.mark.parametrize("front", FRONTS)
async def test_front_states_the_range_of_every_field(front: str) -> None:
    stated, expected = {}, {}
    async with cluster(workers=1) as parts:
        for field, value in beyond_all(front):
            try:
                answer = await FRONTS[front](parts, {"text": "a", **given(field, value)}, {})
            except ValueError:
                assert front == "native"  # no message can hold the value
                continue
            stated[field, value] = answer.message.partition(", not ")[0]
            expected[field, value] = f"{field} must be {RANGES[field]}"
            assert answer.slug in ("out_of_range", "too_many_choices")
    assert stated == expected


@pytest.mark.parametrize(("field", "value"), beyond_all("chat"))
def test_chat_states_the_range_of_the_field(field: str, value: float) -> None:
    name = "top_logprobs" if field == "logprobs" else field
    body = {"messages": [{"role": "user", "content": "a"}], **given(name, value)}
    with pytest.raises(OutOfRange) as caught:
        parse(ChatFields, body)
    assert str(caught.value).startswith(f"{name} must be {RANGES[field]}, not ")


def test_chat_states_the_range_of_max_completion_tokens() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0}
    with pytest.raises(OutOfRange) as caught:
        parse(ChatFields, body)
    assert str(caught.value) == f"max_completion_tokens must be {RANGES['max_tokens']}, not 0"
    assert caught.value.field == "max_completion_tokens"


@pytest.mark.parametrize(("field", "value"), beyond_all("options"))
def test_client_and_llm_state_the_range_of_the_field(field: str, value: float) -> None:
    options: GenerateOptions = given(field, value)  # type: ignore[assignment]
    with pytest.raises(OutOfRange) as caught:
        submission_message("a", options)
    assert str(caught.value).startswith(f"{field} must be {RANGES[field]}, not ")


@pytest.mark.parametrize("front", ["KServe", "HTTP"])
async def test_seed_beyond_64_bits_is_rejected(front: str) -> None:
    async with cluster(workers=1) as parts:
        for value in (10**20 - 1, 1 - 10**20, 2**64, -(2**63) - 1):
            answer = await FRONTS[front](parts, {"text": "a", "seed": value}, {})
            assert answer.slug == "out_of_range"
            says = f"seed must be from {-(2**63)} to {2**64 - 1}, not {str(value)[:20]}"
            assert says in answer.message and len(answer.message) < 200


async def test_seed_within_64_bits_is_served() -> None:
    async with cluster(workers=1) as parts:
        for seed in (-(2**63), -1, 0, 2**63, 2**64 - 1):
            for name, front in FRONTS.items():
                if name != "native" or seed >= 0:
                    assert await front(parts, {"text": "a", "seed": seed}, {}) == Answer()
            submission_message("a", {"seed": seed})


def test_llm_accepts_negative_seeds() -> None:
    with LLM("fake") as llm:
        [one] = llm.generate("a", max_tokens=2, seed=-1)
        [other] = llm.generate("a", max_tokens=2, seed=2**64 - 1)
    assert one.choices[0].token_ids == other.choices[0].token_ids
