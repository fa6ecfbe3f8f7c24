"""Sampling defaults of a model, and which value a request's parameter has."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from everlift.errors import UnknownModel
from everlift.messages import Request, Submission
from everlift.sampling import SamplingParams
from everlift.v1 import inference_pb2 as pb
from router.config import RouterConfig
from router.requests import sampling_defaults
from router.requests.tokenizer import ServedModel
from tests.unit.router.requests.test_served_model import model

DEFAULTS = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}


def write(directory: Path, content: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (DEFAULTS, SamplingParams(**DEFAULTS)),
        ({"temperature": 1, "top_p": 1, "repetition_penalty": 2}, {"repetition_penalty": 2.0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_k": -1}, {}),
        ({"top_k": 0}, {}),
        (dict.fromkeys(DEFAULTS), {}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": True, "max_length": 9, "eos_token_id": 1, "typical_p": 0.5}, {}),
        ({}, {}),
    ],
)
def test_sampling_defaults_of_model(content: Any, expected: Any, tmp_path: Path) -> None:
    if isinstance(expected, dict):
        expected = SamplingParams(**expected)
    assert sampling_defaults.of_model(write(tmp_path, content)) == expected


def test_sampling_defaults_without_file(tmp_path: Path) -> None:
    assert sampling_defaults.of_model(tmp_path) == SamplingParams()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": -1}, "temperature must be from 0 to 100"),
        ({"temperature": math.nan}, "temperature must be from"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": [1]}, "top_p must be a number"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_k": -2}, "top_k must be from -1"),
        ({"min_p": 2}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from"),
        ([], "is not a JSON object"),
    ],
)
def test_sampling_defaults_refuse_malformed_values(
    content: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownModel, match=rf"generation_config\.json.*{words}"):
        sampling_defaults.of_model(write(tmp_path, content))


def test_sampling_defaults_setting(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", {"vocab_size": 512})
    write(tmp_path / "m", DEFAULTS)
    assert RouterConfig().sampling_defaults == "model"
    assert ServedModel.load(directory).sampling_defaults == SamplingParams(**DEFAULTS)
    without = ServedModel.load(directory, sampling_defaults="none")
    assert without.sampling_defaults == SamplingParams()


def test_sampling_defaults_setting_ignores_malformed_values(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", {"vocab_size": 512})
    write(tmp_path / "m", {"temperature": "hot"})
    with pytest.raises(UnknownModel, match=r"set router\.sampling_defaults to none"):
        ServedModel.load(directory)
    ServedModel.load(directory, sampling_defaults="none")


def submitted(message: pb.GenerateRequest) -> Submission:
    defaults = SamplingParams(**DEFAULTS)
    return Submission.from_proto(message, "r", seed=7, sampling_defaults=defaults)


def test_submission_unset_parameters_have_the_models_defaults() -> None:
    message = pb.GenerateRequest(text="a", sampling=pb.Sampling(presence_penalty=1))
    expected = SamplingParams(**DEFAULTS, presence_penalty=1, seed=7)
    assert submitted(message).sampling == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1.0),
        ("temperature", 0.0),
        ("top_p", 1.0),
        ("top_k", 0),
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
    ],
)
def test_submission_set_parameter_overrides_the_default(name: str, value: float) -> None:
    message = pb.GenerateRequest(text="a", sampling=pb.Sampling(**{name: value}))
    assert submitted(message).sampling == SamplingParams(**DEFAULTS | {name: value}, seed=7)


def test_submission_body_hash_is_of_the_clients_message() -> None:
    message = pb.GenerateRequest(text="a")
    assert submitted(message).body_hash == Submission.from_proto(message, "r", seed=7).body_hash


@pytest.mark.parametrize("top_k", [None, 0, 5])
def test_stored_request_keeps_the_resolved_parameters(top_k: int | None) -> None:
    message = pb.GenerateRequest(text="a", sampling=pb.Sampling(top_k=top_k))
    request = ServedModel.load("fake").resolve(submitted(message))
    assert Request.from_bytes(request.to_bytes()).sampling == request.sampling
    assert request.sampling.top_k == (20 if top_k is None else top_k)


def test_sampling_defaults_shown_are_those_that_differ() -> None:
    params = SamplingParams(temperature=0.6, top_k=20, seed=3, min_tokens=2)
    assert sampling_defaults.as_json(params) == {"temperature": 0.6, "top_k": 20}
    assert sampling_defaults.as_proto(params) == pb.Sampling(temperature=0.6, top_k=20)
    assert sampling_defaults.as_proto(SamplingParams()) == pb.Sampling()
