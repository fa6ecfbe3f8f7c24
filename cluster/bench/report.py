"""A load's report: one JSON object, from which every table and page is made. Pure.

Its upper level has the keys of `vllm bench serve`, so that what reads those reads these. What is
ours stands under ``everlift``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from pathlib import Path

from cluster.bench.figures import Json, each_request, figures, more_figures
from cluster.bench.goodput import Slo
from cluster.bench.outcome import Outcome
from cluster.errors import BenchFailed

OURS = "everlift"


@dataclass(frozen=True, slots=True)
class Setting:
    """What was asked, of whom, and how. ``backend`` is everlift, openai or openai-chat; ``where``
    an address; ``load`` what else says which requests came, by the options' names. ``date`` is
    local, as 20261123-101500."""

    date: str
    label: str
    backend: str
    where: str
    model: str
    tokenizer: str | None
    rate: float | None
    burstiness: float
    concurrency: int | None
    load: Mapping[str, object]
    slo: Slo
    percents: Sequence[float]


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one run of a load, in which the generator took ``cpu_share`` of a core."""

    outcomes: Sequence[Outcome]
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Of a ramp: so many requests a second, and whether they were kept up with."""

    rate: float
    seen: Seen
    is_kept: bool


def report(setting: Setting, seen: Seen, *, is_detailed: bool = False) -> Json:
    """``is_detailed`` adds what became of each request."""
    outcomes, slo, percents = seen.outcomes, setting.slo, setting.percents
    return {
        **_head(setting, len(outcomes)),
        **figures(outcomes, slo, percents),
        **_lists(outcomes, is_detailed),
        OURS: {
            "where": setting.where,
            "load": dict(setting.load),
            "goodput_ms": dict(slo.most_ms),
            "percents": list(percents),
            **more_figures(outcomes, slo, percents, seen.cpu_share),
        },
    }


def ramp_report(setting: Setting, stages: Sequence[Stage], *, is_detailed: bool = False) -> Json:
    """Its figures are those of the highest rate that was kept up with; of the lowest one, where
    none was."""
    kept = [stage for stage in stages if stage.is_kept]
    missed = [stage.rate for stage in stages if not stage.is_kept]
    shown = max(kept, key=lambda stage: stage.rate) if kept else stages[0]
    found = report(setting, shown.seen, is_detailed=is_detailed)
    found["request_rate"] = shown.rate
    found[OURS]["saturation"] = {
        "kept": shown.rate if kept else None,
        "too_much": min(missed, default=None),
    }
    found[OURS]["stages"] = [
        _stage(stage, setting) for stage in sorted(stages, key=lambda stage: stage.rate)
    ]
    return found


def write(found: Json, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def read(path: Path) -> Json:
    """Of ours or of vLLM's. Raises BenchFailed, OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise BenchFailed(f"{path}: is no JSON") from None
    if not isinstance(found, dict) or "request_throughput" not in found:
        raise BenchFailed(f"{path}: is no report of `bench serve`")
    return found


def ours(found: Json) -> Json:
    """What stands under our name: nothing in a report of vLLM's."""
    return dict(found.get(OURS) or {})


def _head(setting: Setting, number: int) -> Json:
    rate = setting.rate
    return {
        "date": setting.date,
        "endpoint_type": setting.backend,
        "backend": setting.backend,
        "label": setting.label,
        "model_id": setting.model,
        "tokenizer_id": setting.tokenizer,
        "num_prompts": number,
        "request_rate": "inf" if rate is not None and isinf(rate) else rate,
        "burstiness": setting.burstiness,
        "max_concurrency": setting.concurrency,
    }


def _lists(outcomes: Sequence[Outcome], is_detailed: bool) -> Json:
    """Without details two of them, as vLLM has it."""
    return {
        name: values
        for name, values in each_request(outcomes).items()
        if is_detailed or name in ("latencies", "queue_times")
    }


def _stage(stage: Stage, setting: Setting) -> Json:
    outcomes, percents = stage.seen.outcomes, setting.percents
    more = more_figures(outcomes, setting.slo, percents, stage.seen.cpu_share)
    return {
        "rate": stage.rate,
        "is_kept": stage.is_kept,
        "good_share": more["good_share"],
        "errors": more["errors"],
        "marks": more["marks"],
        **figures(outcomes, setting.slo, percents),
    }
