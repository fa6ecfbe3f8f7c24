"""All that one call of ``everlift bench serve`` asks for, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from cluster.bench.figures import Json
from cluster.bench.goodput import Slo
from cluster.bench.load import Load
from cluster.bench.report import Setting, ramp_report, report
from cluster.bench.run import Manner, ready
from cluster.bench.target import Target


@dataclass(frozen=True, slots=True)
class Asked:
    """``ramp`` is its first rate and its highest; None: the load comes once, as it is."""

    target: Target
    load: Load
    manner: Manner
    slo: Slo
    percents: Sequence[float]
    ramp: tuple[float, float] | None = None
    label: str = ""
    tokenizer: str | None = None
    is_detailed: bool = False


async def measured(asked: Asked, now: datetime) -> Json:
    """Raises BenchFailed, WorkloadFailed, and what connecting raises."""
    async with ready(asked.target, asked.load, asked.manner) as run:
        setting = _setting(asked, run.model, now)
        if asked.ramp is None:
            seen = await run.send(asked.load)
            return report(setting, seen, is_detailed=asked.is_detailed)
        stages = await run.climb(asked.load, *asked.ramp, asked.slo)
        return ramp_report(setting, stages, is_detailed=asked.is_detailed)


def _setting(asked: Asked, model: str, now: datetime) -> Setting:
    target, load = asked.target, asked.load
    return Setting(
        date=now.strftime("%Y%m%d-%H%M%S"),
        label=asked.label,
        backend=target.backend,
        where=target.where,
        model=model,
        tokenizer=asked.tokenizer,
        rate=load.rate,
        burstiness=load.burstiness,
        concurrency=asked.manner.concurrency,
        load=_described(load, asked),
        slo=asked.slo,
        percents=asked.percents,
    )


def _described(load: Load, asked: Asked) -> Mapping[str, object]:
    """By the options' names; what is as usual and says nothing is left out."""
    has_own_lengths = load.workloads or load.trace
    found = {
        "workload": ", ".join(load.workloads) if load.workloads else None,
        "trace": load.trace.name if load.trace else None,
        "from": load.begin_s or None,
        "to": load.end_s,
        "speed": load.speed if load.trace else None,
        "steady": load.is_steady or None,
        "input tokens": None if has_own_lengths else load.input_tokens,
        "output tokens": None if has_own_lengths else load.output_tokens,
        "longest input": load.longest_input,
        "longest output": load.longest_output,
        "duration, s": load.duration_s,
        "ramp": ":".join(f"{rate:g}" for rate in asked.ramp) if asked.ramp else None,
        "seed": load.seed,
        "ignore_eos": asked.target.ignore_eos,
        "temperature": asked.target.temperature,
        "fields": ", ".join(asked.target.fields) or None,
        "warm-up": asked.manner.warm_up,
    }
    return {name: value for name, value in found.items() if value is not None}
