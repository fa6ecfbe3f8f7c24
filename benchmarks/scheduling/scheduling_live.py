"""Comparison of the queue's orders with a real engine under overload.

The cluster runs as plain processes on this machine: router, embedded ledger, and one worker with
the 125M checkpoint and SLOTS slots. In each round all cases get the same requests at the same times
(scheduling_mix.py). Requests arrive for ``duration_s`` at ``load`` times the saturation rate, which
is measured before the first case of the round. A case ends when all its requests have ended. If the
cases' tokens per second differ, the speed of the machine has changed, and the cases are not
comparable.

The router predicts output lengths by a model that was trained on other requests of the same kind.

Normalised latency is a request's latency divided by its output tokens. A tenth of the requests are
marked "high". In the case "classes" they are sent with a higher priority. In the others the cluster
cannot tell them from the rest, but they have figures of their own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.online.online_load import Answer, Client, percentile
from benchmarks.online.online_servers import everlift, serving
from benchmarks.scheduling.scheduling_mix import Request, mix

Figures = dict[str, float]

SLOTS = 16
_HIGH = 5
#: Number of requests that are sent at once to measure the saturation rate.
_SATURATING = 160
_WARM_UP = 40
#: Number and seed of the requests that the predictor is trained on.
_EXAMPLES, _EXAMPLES_SEED = 3000, 999
#: Share of answers at either end that is left out, while the batch fills and empties.
_LEFT_OUT = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """Case of the comparison: ``settings`` of the cluster, and ``priority`` of high requests."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0


#: Orders of the queue; "classes" is the default order, with a higher priority for high requests.
CASES = ("fifo", "shortest", "ranked", "hrrn", "classes")


def cases(settings: Mapping[str, Any], names: Sequence[str] = CASES) -> tuple[Case, ...]:
    """Return the named cases, all with ``settings``."""
    return tuple(
        Case(name, settings, _HIGH)
        if name == "classes"
        else Case(name, {**settings, "router.order": name})
        for name in names
    )


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path
    load: float
    duration_s: float
    logs: Path

    @property
    def predictor(self) -> Path:
        return self.logs.absolute() / "lengths.json"


def train(plan: Plan) -> dict[str, Any]:
    """Train the length predictor, write it to ``plan.predictor``, and return the training report.

    Write the examples to ``plan.logs``. Raises CalledProcessError if the command fails.
    """
    plan.logs.mkdir(parents=True, exist_ok=True)
    examples = plan.logs / "examples.jsonl"
    seen = mix(_EXAMPLES, 1.0, _EXAMPLES_SEED)
    examples.write_text("".join(json.dumps(it.example()) + "\n" for it in seen))
    command = [
        *(sys.executable, "-m", "cluster.cli", "train-predictor", str(plan.predictor)),
        *("--examples", str(examples), "--set", f"model={plan.model}", "--json"),
    ]
    report: dict[str, Any] = json.loads(subprocess.check_output(command))
    return report


async def run_case(case: Case, plan: Plan, seed: int, saturated: float | None) -> Figures:
    """Run one case on a new cluster and return its figures.

    ``saturated`` is the saturation rate in output tokens per second, from which the arrival rate
    follows; None: it is measured first. Raises NotServing, Incomplete.
    """
    settings = {
        "worker.max_num_seqs": SLOTS,
        "router.predictor": plan.predictor,
        **case.settings,
    }
    server = everlift(case.name, with_ray=False, more=settings)
    async with serving(server, plan.model, plan.logs) as client:
        await _send(client, case, mix(_WARM_UP, 0.0, 2 * seed))
        if saturated is None:
            seen = await _send(client, case, mix(_SATURATING, 0.0, 2 * seed + 1))
            saturated = saturation(seen)
        mean_tokens = statistics.fmean(it.tokens for it in mix(10_000, 0.0, seed))
        per_s = plan.load * saturated / mean_tokens
        requests = mix(round(per_s * plan.duration_s), per_s, seed)
        answers = await _send(client, case, requests)
    return figures(requests, answers) | {
        "saturation_tokens_per_s": saturated,
        "requests_per_s": per_s,
    }


async def _send(client: Client, case: Case, requests: Sequence[Request]) -> list[Answer]:
    return await client.send(
        [it.to_timed_request(case.priority if it.is_high else 0) for it in requests]
    )


def saturation(answers: Sequence[Answer]) -> float:
    """Return the output tokens per second of saturated answers.

    The first and last fifth of the answers to end are left out, while the batch fills and empties.
    """
    ended = sorted(answers, key=lambda answer: answer.last_token)
    first, last = (round(part * len(ended)) for part in (_LEFT_OUT, 1 - _LEFT_OUT))
    seconds = ended[last].last_token - ended[first].last_token
    return sum(answer.tokens for answer in ended[first:last]) / seconds


def figures(requests: Sequence[Request], answers: Sequence[Answer]) -> Figures:
    """Return rates and latencies of ``answers``, which are in the order of ``requests``.

    Times are in seconds, normalised latencies in ms per token. Figures named "high" are those of
    the high requests only.
    """
    high = [answer for it, answer in zip(requests, answers, strict=True) if it.is_high]
    found = {
        "requests": len(answers),
        "tokens_per_s": sum(it.tokens for it in answers) / max(it.last_token for it in answers),
        "normalised_latency_mean_ms": statistics.fmean(it.e2e_s / it.tokens for it in answers)
        * 1e3,
    }
    for name, some in (("", answers), ("high_", high)):
        ttft = [answer.ttft_s for answer in some]
        found[f"{name}ttft_mean_s"] = statistics.fmean(ttft)
        found[f"{name}ttft_p50_s"] = statistics.median(ttft)
        found[f"{name}ttft_p99_s"] = percentile(ttft, 99)
    return found


def ratios(found: Mapping[str, Figures]) -> Figures:
    """Return the figures of each case divided by those of ``fifo``; empty if that did not run.

    ``found`` has the medians over the rounds, by case.
    """
    if (fifo := found.get("fifo")) is None:
        return {}
    each = {}
    for short, case in (("sjf", "shortest"), ("ranked", "ranked"), ("hrrn", "hrrn")):
        for name, figure in (
            ("mean", "normalised_latency_mean_ms"),
            ("p99_ttft", "ttft_p99_s"),
        ):
            if case in found:
                each[f"{short}_{name}_vs_fifo"] = found[case][figure] / fifo[figure]
    if "classes" in found:
        figure = "high_ttft_p99_s"
        each["high_class_p99_ttft_vs_fifo"] = found["classes"][figure] / fifo[figure]
    return each
