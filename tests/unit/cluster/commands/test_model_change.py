"""Progress of a worker's change to another model."""

from __future__ import annotations

import pytest

from cluster.commands.model_change import ModelChange
from everlift.errors import InvalidRequest
from everlift.v1 import inference_pb2 as pb


def worker(worker_id: str, model: str, pid: int, host: str = "10.0.0.1", **more: str) -> object:
    return pb.WorkerStatus(
        worker_id=worker_id, model=model, pid=pid, address=f"{host}:4000", alive=True, **more
    )


FIRST = worker("first", "small", 7)
OTHER = worker("other", "large", 8)
CHANGE = ModelChange(FIRST, "large", frozenset({"first", "other"}))


def status(*workers: object) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(workers=workers)


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((FIRST, OTHER), id="draining"),
        pytest.param((OTHER,), id="loading"),
        pytest.param((OTHER, worker("new", "large", 7, "10.0.0.2")), id="same_pid_elsewhere"),
        pytest.param((OTHER, worker("new", "small", 9, "10.0.0.2")), id="replaced_elsewhere"),
    ],
)
def test_model_change_goes_on_until_its_machine_joins(workers: tuple[object, ...]) -> None:
    assert CHANGE.joined(status(*workers)) == ""


@pytest.mark.parametrize("pid", [7, 9], ids=["same_process", "restarted_process"])
def test_model_change_ends_when_its_machine_joins_the_model(pid: int) -> None:
    assert CHANGE.joined(status(OTHER, worker("second", "large", pid))) == "second"


def test_model_change_reports_why_the_worker_keeps_its_model() -> None:
    kept = worker("first", "small", 7, change_error="large: no such file")
    with pytest.raises(InvalidRequest, match="still serves small: large: no such file"):
        CHANGE.joined(status(kept, OTHER))


@pytest.mark.parametrize("model", ["small", "medium"])
def test_model_change_reports_a_killed_process_that_was_replaced(model: str) -> None:
    cause = rf"first has not joined with large.*second with {model}"
    with pytest.raises(InvalidRequest, match=cause):
        CHANGE.joined(status(OTHER, worker("second", model, 9)))
