"""Plans as tables, sentences, JSON and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cluster.simulator.as_json import plain
from cluster.simulator.plan import Plan, Trial
from cluster.simulator.tables import seconds
from cluster.simulator.target import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Relative improvement of an attained value below which more workers count as having no effect.
_SAME = 0.02


def table(plans: Mapping[str, Plan], targets: Sequence[Target]) -> Table:
    """Return a table with a row for each trial, in a section for each kind of worker.

    A trial is a simulation with some number of workers. ``plans`` maps the name of a kind to its
    plan.
    """
    wanted = (f"{target.name}\n(at most {seconds(target.most_s)})" for target in targets)
    shown = Table("kind", "workers", *wanted, "", box=SIMPLE_HEAD)
    for column in shown.columns[1:-1]:
        column.justify = "right"
    for kind, plan in plans.items():
        for trial in plan.trials:
            cells = [seconds(value) if isfinite(value) else "never" for value in trial.attained]
            shown.add_row(
                kind, f"{trial.workers}", *cells, "enough" if trial.is_enough else "too few"
            )
        shown.add_section()
    return shown


def verdict(kind: str, plan: Plan, targets: Sequence[Target]) -> str:
    """Return a line of text: whether and how many workers of this kind are enough.

    If requests were refused, the line also states how many, by cause.
    """
    if plan.workers is not None:
        enough = next(trial for trial in plan.trials if trial.workers == plan.workers)
        return f"{kind}: {plan.workers} {_are(plan.workers)} enough{_refused(enough)}"
    last = plan.trials[-1]
    missed = [
        f"{target.name} is {seconds(value) if isfinite(value) else 'never reached'}"
        for target, value in zip(targets, last.attained, strict=True)
        if value > target.most_s
    ]
    said = f"{kind}: {last.workers} {_are(last.workers)} not enough: {', '.join(missed)}"
    flat = ", and more workers would not change that" if _is_flat(plan, targets) else ""
    return said + flat + _refused(last)


def _refused(trial: Trial) -> str:
    causes = sorted(trial.refused.items(), key=itemgetter(1), reverse=True)
    return "".join(f"; {number} requests ended with {cause}" for cause, number in causes)


def _are(workers: int) -> str:
    return "worker is" if workers == 1 else "workers are"


def _is_flat(plan: Plan, targets: Sequence[Target]) -> bool:
    last = plan.trials[-1]
    fewer = [trial for trial in plan.trials if 2 * trial.workers <= last.workers]
    if not fewer:
        return False
    if last.refused and last.refused == fewer[-1].refused and inf in last.attained:
        return True
    return any(
        target.most_s < now < inf and now > before * (1 - _SAME)
        for target, before, now in zip(targets, fewer[-1].attained, last.attained, strict=True)
    )


def as_json(plans: Mapping[str, Plan], targets: Sequence[Target]) -> dict[str, object]:
    names = [target.name for target in targets]
    return {
        "targets": {target.name: target.most_s for target in targets},
        "kinds": {
            kind: {
                "workers": plan.workers,
                "trials": [
                    {
                        "workers": trial.workers,
                        "attained_s": plain(dict(zip(names, trial.attained, strict=True))),
                        "is_enough": trial.is_enough,
                        "refused": dict(trial.refused),
                    }
                    for trial in plan.trials
                ],
            }
            for kind, plan in plans.items()
        },
    }


def draw(plans: Mapping[str, Plan], targets: Sequence[Target], path: Path) -> Path:
    """Draw the attained latencies over the number of workers, and return ``path``, the saved file.

    There is a panel for each target, with a line for each kind of worker. A ring marks the fewest
    workers that are enough. Raises OSError.
    """
    # Importing matplotlib takes seconds, and most plans are not drawn.
    from matplotlib import pyplot

    from cluster.simulator.pictures import plain_numbers, save

    figure, panels = pyplot.subplots(
        1, len(targets), figsize=(1 + 6 * len(targets), 4.8), squeeze=False
    )
    for place, target in enumerate(targets):
        panel = panels[0][place]
        for kind, plan in plans.items():
            points = [
                (trial.workers, trial.attained[place] * 1e3)
                for trial in plan.trials
                if isfinite(trial.attained[place])
            ]
            _line(panel, kind, points, plan.workers)
        panel.set_yscale("log")
        if not any(isfinite(it.attained[place]) for plan in plans.values() for it in plan.trials):
            panel.set_ylim(target.most_s * 1e2, target.most_s * 1e4)
        panel.axhline(target.most_s * 1e3, color="grey", linestyle="--", linewidth=1)
        panel.set_title(target.name)
        panel.set_xlabel("workers")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3, which="both", linewidth=0.4)
        plain_numbers(panel.yaxis)
    panels[0][0].set_ylabel("ms")
    panels[0][0].legend(frameon=False)
    return save(figure, path)


def _line(panel: Axes, kind: str, points: Sequence[tuple[int, float]], chosen: int | None) -> None:
    workers, values = [point[0] for point in points], [point[1] for point in points]
    (line,) = panel.plot(workers, values, marker="o", markersize=4, label=kind)
    ringed = [point for point in points if point[0] == chosen]
    for number, value in ringed:
        panel.plot(
            number,
            value,
            marker="o",
            markersize=13,
            markerfacecolor="none",
            color=line.get_color(),
        )
