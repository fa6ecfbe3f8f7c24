"""What a process that simulates is told, and what it answers."""

from __future__ import annotations

from math import inf

import pytest

from cluster.explain.launch import Answer, Launch, decode, decode_answer, encode, encode_answer
from everlift.errors import EverliftError, UnknownRequest
from everlift.v1 import admin_pb2
from router.config import RouterConfig
from router.gateway.what_if import Estimates, NoEstimate, Question
from router.ledger.config import LedgerConfig

STEP_TIME = admin_pb2.StepTimeModel(overhead_s=0.001, token_s=1e-5, error=0.1)
KINDS = [
    admin_pb2.WorkerKind(device="h100", workers=2, num_blocks=9000, step_time=STEP_TIME),
    admin_pb2.WorkerKind(device="l4", workers=1),
]
POLICIES = {
    "fifo": RouterConfig(model="fake"),
    "hrrn patience=3": RouterConfig(model="fake", order="hrrn", patience=3.0),
}


def test_all_of_it_arrives_in_one_line() -> None:
    ledger = LedgerConfig(url="redis://user:secret@here:6379/0", shards=4)
    launch = Launch(ledger, Question("acme/r", POLICIES, KINDS))
    line = encode(launch)
    assert b"\n" not in line
    assert decode(line.decode()) == launch
    assert "secret" not in repr(launch)


def test_estimates_come_back_as_they_are() -> None:
    estimates = Estimates({"fifo": 1.5, "hrrn": inf}, 40, 0.25)
    assert decode_answer(encode_answer(estimates).encode()) == estimates


@pytest.mark.parametrize("answer", [NoEstimate("why"), UnknownRequest("no request r")])
def test_so_does_what_went_wrong(answer: Answer) -> None:
    assert isinstance(answer, Exception)
    with pytest.raises(type(answer), match=str(answer)):
        decode_answer(encode_answer(answer).encode())


def test_an_end_without_an_answer_is_an_error() -> None:
    with pytest.raises(EverliftError, match="without an answer"):
        decode_answer(b"")
