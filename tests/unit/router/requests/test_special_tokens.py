"""Special tokens in an output's text: absent, or kept if the request asks for them."""

from __future__ import annotations

import pytest

from everlift.messages import Request, Submission
from everlift.v1 import inference_pb2 as pb
from router.ledger.entry import StoredChoice
from router.requests.recovery import _replayed
from router.requests.request import Output
from router.requests.tokenizer import ServedModel
from tests.support.worker.vocabularies import BYTE_LEVEL

BOS, EOS = BYTE_LEVEL.encode("<s></s>")
COUNT = BYTE_LEVEL.encode("count")
MODEL = ServedModel("m", BYTE_LEVEL, (EOS,), BYTE_LEVEL.vocab_size, 4096)


def request(**fields: object) -> Request:
    message = pb.GenerateRequest(text="hi", **fields)  # type: ignore[arg-type]
    return MODEL.resolve(Submission.from_proto(message, "r", seed=1))


def text(asked: Request, ids: list[int]) -> str:
    output = Output.of(asked, BYTE_LEVEL)
    output.extend(ids)
    output.finish()
    return output.whole_text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "countcount"),
        ({"include_stop": True}, "countcount"),
        ({"keep_special_tokens": True}, "<s>count<s>count"),
        ({"keep_special_tokens": True, "include_stop": True}, "<s>count<s>count</s>"),
        ({"keep_special_tokens": True, "ignore_eos": True}, "<s>count<s>count</s>"),
        ({"keep_special_tokens": True, "stop": ["<s>"]}, ""),
    ],
)
def test_text_has_the_special_tokens_that_the_request_keeps(
    fields: dict[str, object], expected: str
) -> None:
    assert text(request(**fields), [BOS, *COUNT, BOS, *COUNT, EOS]) == expected


@pytest.mark.parametrize("keeps", [False, True])
async def test_stored_request_yields_the_same_text(keeps: bool) -> None:
    asked = request(keep_special_tokens=keeps)
    stored = Request.from_bytes(asked.to_bytes())
    assert stored.keep_special_tokens is keeps
    ids = [*COUNT, BOS, *COUNT, EOS]
    replayed = await _replayed(stored, StoredChoice(tuple(ids)), BYTE_LEVEL)
    assert [replayed.text(at, at + 1) for at in range(len(ids))] == [
        "count",
        "<s>" if keeps else "",
        "count",
        "",
    ]
