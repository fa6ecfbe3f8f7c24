"""Accuracy and cost of the prediction of output lengths.

    python benchmarks/prediction.py [--outputs 10000] [--rounds 9] [--out FILE]

Requests are those of tests/support/router/mixes.py. The output lengths of each kind of request are
log-normal, so even equal prompts have random lengths. The oracle knows the kind. The model is
trained on the first 80 % of the outputs. The others are predicted one by one, and the predictor
gets each true length afterwards.

Times are those of a router's Predictor, as medians over the rounds: of ``predict`` (features,
trees, correction, rank), and of ``note`` for an ended output, with prompts of 20 to 100,000 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import lightgbm

from benchmarks import report
from cluster.prediction.training import PARAMETERS, ROUNDS, table
from everlift.messages import Request
from router.prediction.model import Model
from router.prediction.predictor import Histories, Predictor
from router.prediction.trust import kendall_tau
from tests.support.router.mixes import APPLICATIONS, Application, Kind
from tests.support.router.prediction_support import examples, learnt, mixed, request, served

AT_ONCE = 500
#: Requests of a list for learning to rank, and the largest grade of a length.
LIST, MOST_GRADE = 100, 30
PROMPT_TOKENS = (20, 200, 2_000, 100_000)
#: Applications with one kind of request each, so that the prompt's template reveals the kind.
ONE_KIND = tuple(replace(it, kinds=it.kinds[:1]) for it in APPLICATIONS)
#: Mix whose output lengths do not depend on the prompt.
NOISE = (Application("noise", "acme", "", (Kind(("{text}",), 100, 1.0),)),)
MIXES = {"all": APPLICATIONS, "one_kind_each": ONE_KIND, "noise": NOISE}


def us_each(work: Callable[[], object]) -> float:
    began = time.thread_time()
    for _ in range(AT_ONCE):
        work()
    return (time.thread_time() - began) / AT_ONCE * 1e6


def requests(seed: int) -> dict[int, Request]:
    """Return requests with prompts of each length, by number of tokens."""
    (it,) = islice(mixed(seed, 1), 1)
    ids = request(it).prompt_ids
    return {
        count: replace(request(it), prompt_ids=(ids * (count // len(ids) + 1))[:count])
        for count in PROMPT_TOKENS
    }


def costs(predictor: Predictor, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Return the us per call of each round, by function and number of prompt tokens."""
    asked = requests(3)
    seen: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in asked} for name in ("predict", "note")
    }
    for _ in range(rounds):
        for count, each in asked.items():
            prediction = predictor.predict(each, 0.0)
            seen["predict"][count].append(us_each(lambda each=each: predictor.predict(each, 0.0)))
            seen["note"][count].append(
                us_each(lambda prediction=prediction: predictor.note(prediction, 100))
            )
    return seen


def load_ms(text: str, rounds: int) -> float:
    """Return the median CPU time to parse a model, in ms; a router does it in a thread."""
    seen = []
    for _ in range(rounds):
        began = time.thread_time()
        Model.parse(text)
        seen.append((time.thread_time() - began) * 1e3)
    return statistics.median(seen)


def medians(seen: dict[int, list[float]]) -> dict[int, float]:
    return {count: statistics.median(values) for count, values in seen.items()}


def quality(outputs: int) -> dict[str, Any]:
    """Return the accuracy by mix; in "unnamed", requests do not name their application."""
    found = {name: learnt(1, outputs, mix)[1].all for name, mix in MIXES.items()}
    found["unnamed"] = learnt(1, outputs, APPLICATIONS, False)[1].all
    return {name: asdict(figures) for name, figures in found.items()}


def by_objective(outputs: int) -> dict[str, float]:
    """Return Kendall's tau of trees by training objective: the median, or learning to rank.

    All have the same features, and no corrections. A list to be ranked consists of LIST consecutive
    requests.
    """
    found = examples(1, outputs, APPLICATIONS)
    rows, lengths = table(found, Histories())
    cut = outputs * 8 // (10 * LIST) * LIST
    grades = (lengths / lengths.max() * MOST_GRADE).astype(int)
    ranking = {"label_gain": [*range(MOST_GRADE + 1)], "lambdarank_truncation_level": LIST}
    return {
        "quantile": _tau({"objective": "quantile", "alpha": 0.5}, rows, lengths, cut, lengths),
        "lambdarank": _tau({"objective": "lambdarank"} | ranking, rows, grades, cut, lengths),
        "rank_xendcg": _tau({"objective": "rank_xendcg"} | ranking, rows, grades, cut, lengths),
    }


def _tau(objective: dict[str, Any], rows: Any, targets: Any, cut: int, lengths: Any) -> float:
    group = [LIST] * (cut // LIST) if "label_gain" in objective else None
    data = lightgbm.Dataset(rows[:cut], targets[:cut], group=group)
    booster = lightgbm.train({**PARAMETERS, **objective}, data, ROUNDS)
    return kendall_tau([*zip(booster.predict(rows[cut:]), lengths[cut:], strict=True)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--outputs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("build/bench/prediction.json"))
    args = parser.parse_args(arguments)
    text, found = learnt(1, args.outputs, APPLICATIONS)
    predictor = Predictor(served().tokenizer, served().name, min_tau=-1.0)
    predictor.load(Model.parse(text))
    raw = costs(predictor, args.rounds)
    us = {name: medians(seen) for name, seen in raw.items()}
    mixes = quality(args.outputs)
    assert found.all.tau_oracle is not None
    report.write(
        args.out,
        packages=("lightgbm", "numpy", "tokenizers"),
        settings={"outputs": args.outputs, "rounds": args.rounds, "at_once": AT_ONCE},
        raw={
            "mixes": mixes,
            "tau_by_objective": by_objective(args.outputs),
            "report": found.plain(),
            "us": us,
            "rounds": raw,
            "load_ms": load_ms(text, args.rounds),
            "file_bytes": len(text),
        },
        ratios={
            "tau_model": found.all.tau,
            "tau_oracle": found.all.tau_oracle,
            "tau_model_over_oracle": found.all.tau / found.all.tau_oracle,
            "tau_model_unnamed": mixes["unnamed"]["tau"],
            "tau_prompt_length": found.all.tau_prompt_length,
            "predict_ms": max(us["predict"].values()) / 1e3,
            "note_ms": max(us["note"].values()) / 1e3,
        },
    )


if __name__ == "__main__":
    main()
