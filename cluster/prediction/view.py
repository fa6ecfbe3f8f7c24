"""A report on a predictor, for people."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cluster.prediction.report import Figures, Report
from router.prediction.model import QUANTILES

#: Applications that are shown, those with the most outputs.
_ROWS = 20
#: Of a name.
_CHARACTERS = 12


def table(report: Report) -> Table:
    shown = Table(
        *("application", "outputs", "tau", "length", "oracle"),
        *(f"p{quantile * 100:g}" for quantile in QUANTILES),
        *("total", "error", "mean"),
        box=SIMPLE_HEAD,
        padding=0,
        caption=f"Learnt from {report.learnt_from} outputs; these came later. tau: Kendall's, "
        "beside that of the prompt's length alone and of who knew what to expect. p50, p90: part "
        "within. total: predicted over actual tokens. error: in tokens, beside that of a mean.",
    )
    shown.add_row("all", *_cells(report.all), end_section=True)
    most = sorted(report.by_application.items(), key=lambda item: -item[1].outputs)
    for name, figures in most[:_ROWS]:
        shown.add_row(name[:_CHARACTERS], *_cells(figures))
    return shown


def _cells(figures: Figures) -> list[str]:
    oracle = "-" if figures.tau_oracle is None else f"{figures.tau_oracle:.2f}"
    return [
        *(str(figures.outputs), f"{figures.tau:.2f}", f"{figures.tau_prompt_length:.2f}", oracle),
        *(f"{100 * part:.0f}%" for part in figures.coverage),
        f"{figures.total_ratio:.2f}",
        f"{figures.mean_absolute_error:.0f}",
        f"{figures.mean_absolute_error_of_mean:.0f}",
    ]
