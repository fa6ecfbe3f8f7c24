"""Requests of made-up mixes as a predictor receives them, and trained predictors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

from cluster.config import DEMO_MODEL
from cluster.prediction.examples import Example, from_lines
from cluster.prediction.report import Report
from cluster.prediction.training import trained
from everlift.messages import OnDisconnect, Request
from everlift.request_id import qualify
from everlift.sampling import SamplingParams
from router.prediction.model import Model
from router.prediction.predictor import Predictor
from router.requests.tokenizer import ServedModel
from tests.support.router.mixes import APPLICATIONS, Application, Drawn, drawn


@cache
def served() -> ServedModel:
    return ServedModel.load(str(DEMO_MODEL))


def mixed(
    seed: int, number: int, applications: Sequence[Application] = APPLICATIONS
) -> list[Drawn]:
    return [*islice(drawn(random.Random(seed), applications), number)]


def lines(requests: Iterable[Drawn], *, names_applications: bool = True) -> list[str]:
    """Return the lines of a file of examples."""
    return [
        json.dumps(
            {
                "prompt": it.prompt,
                "output_tokens": it.output_tokens,
                "expected_tokens": it.mean_tokens,
                "application": it.application if names_applications else "",
                "tenant": it.tenant,
                "arrived": it.arrived,
            }
        )
        for it in requests
    ]


def examples(
    seed: int,
    number: int,
    applications: Sequence[Application],
    *,
    names_applications: bool = True,
) -> list[Example]:
    requests = mixed(seed, number, applications)
    return from_lines(lines(requests, names_applications=names_applications), served())


@cache
def learnt(
    seed: int = 1,
    number: int = 2000,
    applications: tuple[Application, ...] = APPLICATIONS,
    names_applications: bool = True,
) -> tuple[str, Report]:
    """Return a trained predictor's file and the report on its quality."""
    training_examples = examples(seed, number, applications, names_applications=names_applications)
    return trained(served().name, training_examples)


def request(it: Drawn, **changes: Any) -> Request:
    """Return a request as a gateway has it; its outputs end at EOS."""
    model = served()
    made = Request(
        request_id=qualify(it.tenant, "r"),
        model=model.name,
        fingerprint="",
        prompt_ids=model.encode(it.prompt),
        max_tokens=1 << 20,
        sampling=SamplingParams(seed=1),
        stop=(),
        stop_token_ids=model.eos_ids,
        on_disconnect=OnDisconnect.CANCEL,
        deadline=None,
        body_hash=b"",
        application=it.application,
    )
    return replace(made, **changes)


def predictor(*, is_loaded: bool = True, min_tau: float = 0.1) -> Predictor:
    made = Predictor(served().tokenizer, served().name, min_tau)
    if is_loaded:
        made.load(Model.parse(learnt()[0]))
    return made
