"""Models of a cluster, by the names that clients and the ledger use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everlift.errors import InvalidRequest, SettingsError, UnknownModel
from everlift.messages import Submission
from everlift.v1 import inference_pb2 as pb
from everlift.v1.session_pb2 import WorkerInfo
from router.requests.served_models import ServedModels
from router.requests.tokenizer import ByteTokenizer, ServedModel


def model(name: str, **fields: object) -> ServedModel:
    return ServedModel(name, ByteTokenizer(), (), 256, 100, **fields)  # type: ignore[arg-type]


def two() -> ServedModels:
    return ServedModels(
        [model("big", aliases=("b",)), model("small", adapters={"sql": "org/sql"}, aliases=("s",))]
    )


def submission(name: str) -> Submission:
    message = pb.GenerateRequest(text="hi", request_id="r", max_tokens=8, model=name)
    return Submission.from_proto(message, "r", seed=1)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("", "big"),
        ("big", "big"),
        ("b", "big"),
        ("small", "small"),
        ("s", "small"),
        ("sql", "small"),
    ],
)
def test_served_models_find_a_model_by_every_name(name: str, served: str) -> None:
    models = two()
    assert models.requested(name).name == served
    assert models.resolve(submission(name)).model == served
    assert models.canonical_name(name) == served


def test_served_models_name_all_models_to_strangers() -> None:
    models = two()
    assert models.names == ["big", "b", "small", "s", "sql"]
    with pytest.raises(
        UnknownModel, match=r"'c' is not served; the served models are 'big' or"
    ) as it:
        models.requested("c")
    assert it.value.field == "model"
    assert models.canonical_name("c") == ""
    with pytest.raises(UnknownModel, match=r"the served model is 'big'$"):
        ServedModels([model("big")]).requested("c")


def test_served_models_keep_limits_and_fingerprints_apart() -> None:
    models = two()
    big, small = models
    models.assume_limits([WorkerInfo(model=name, num_blocks=9, max_model_len=50) for name in "xy"])
    assert (big.max_model_len, small.max_model_len) == (None, None)
    workers = [
        WorkerInfo(worker_id=name, model=name, fingerprint=name, num_blocks=9, max_model_len=length)
        for name, length in (("big", 64), ("small", 32))
    ]
    models.update_limits(workers)
    assert (big.max_model_len, small.max_model_len) == (64, 32)
    assert (big.fingerprint, small.fingerprint) == ("big", "small")
    for worker in workers:
        models.check_worker(worker)
    with pytest.raises(InvalidRequest, match=r"worker w has the model 'x'; .* 'big' or 'small'"):
        models.check_worker(WorkerInfo(worker_id="w", model="x"))


def test_served_models_refuse_a_model_that_is_gone() -> None:
    models = two()
    request = replace(models.resolve(submission("s")), model="gone")
    assert models.find(request) is None
    with pytest.raises(UnknownModel, match="'gone' is no longer served"):
        models.of(request)


def test_served_models_refuse_a_name_of_two_models() -> None:
    with pytest.raises(SettingsError, match="two models of the cluster have the name 'a'"):
        ServedModels([model("a"), model("b", aliases=("a",))])
