"""Report on the accuracy of a predictor, and its table for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import log
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cluster.prediction.examples import Example, by_request
from router.prediction.model import QUANTILES
from router.prediction.predictor import Guess, Learned, OutputLengths, narrowest
from router.prediction.trust import kendall_tau


@dataclass(frozen=True, slots=True)
class Figures:
    """Accuracy of predicted output lengths.

    Attributes:
        outputs: Number of outputs.
        tau: Kendall's tau of predicted and actual lengths.
        tau_prompt_length: Kendall's tau of prompt lengths and actual lengths.
        tau_oracle: Kendall's tau of expected and actual lengths; None unless all are known.
        coverage: For each of QUANTILES, the share of outputs that are at most as long as the
            predicted quantile.
        total_ratio: Sum of predicted tokens / sum of actual tokens.
        mean_absolute_error: Mean absolute error of the predictions, in tokens.
        mean_absolute_error_of_mean: The same if the running mean of earlier outputs is predicted.
    """

    outputs: int
    tau: float
    tau_prompt_length: float
    tau_oracle: float | None
    coverage: tuple[float, ...]
    total_ratio: float
    mean_absolute_error: float
    mean_absolute_error_of_mean: float


@dataclass(frozen=True, slots=True)
class _Prediction:
    example: Example
    guess: Guess
    mean: float


@dataclass(frozen=True, slots=True)
class Report:
    """Accuracy of a predictor on outputs that arrived after its training examples.

    ``learnt_from`` is the number of training examples. ``by_application`` has figures by the name
    of the application. Requests without an application are grouped by the digest of their narrowest
    group of similar requests: the last digest in ``RequestFeatures.groups`` that is not empty.
    """

    learnt_from: int
    all: Figures
    by_application: dict[str, Figures]

    def plain(self) -> dict[str, Any]:
        """Return the report as a dict of JSON values, which a predictor's file contains."""
        groups = {name: asdict(figures) for name, figures in self.by_application.items()}
        return {
            "learnt_from": self.learnt_from,
            "quantiles": QUANTILES,
            **asdict(self.all),
            "by_application": groups,
        }


def examine(learned: Learned, held_out: Sequence[Example], learnt_from: int) -> Report:
    """Return the accuracy of ``learned`` on ``held_out`` examples, which are in order of arrival.

    As in a router, a prediction may use the output lengths of all earlier requests: the length of
    each output is recorded in ``learned`` after its prediction. ``learnt_from`` is the number of
    training examples, for the report.
    """
    mean, predictions = OutputLengths(), list[_Prediction]()
    for features, outputs in by_request(held_out):
        guess = learned.guess(features)
        predictions += [_Prediction(output, guess, mean.mean) for output in outputs]
        for output in outputs:
            learned.note(guess, output.output_tokens)
            mean.note(output.output_tokens)
    groups = defaultdict(list)
    for each in predictions:
        groups[each.example.application or narrowest(each.example.features.groups)].append(each)
    return Report(
        learnt_from, _figures(predictions), {name: _figures(groups[name]) for name in groups}
    )


def _figures(predictions: Sequence[_Prediction]) -> Figures:
    lengths = [each.example.output_tokens for each in predictions]
    tokens = [each.guess.tokens for each in predictions]
    expected = [each.example.expected_tokens for each in predictions]
    known = [it for it in expected if it is not None]
    count = len(predictions)
    return Figures(
        outputs=count,
        tau=kendall_tau([*zip(tokens, lengths, strict=True)]),
        tau_prompt_length=kendall_tau(
            [*zip((each.example.prompt_tokens for each in predictions), lengths, strict=True)]
        ),
        tau_oracle=(
            kendall_tau([*zip(known, lengths, strict=True)]) if len(known) == count else None
        ),
        coverage=tuple(
            _mean(log(each.example.output_tokens) <= each.guess.logs[place] for each in predictions)
            for place in range(len(QUANTILES))
        ),
        total_ratio=sum(tokens) / sum(lengths),
        mean_absolute_error=_mean(abs(a - b) for a, b in zip(tokens, lengths, strict=True)),
        mean_absolute_error_of_mean=_mean(
            abs(each.mean - each.example.output_tokens) for each in predictions
        ),
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


#: Number of applications that the table shows, those with the most outputs.
_ROWS = 20
#: Number of characters of an application's name that the table shows.
_CHARACTERS = 12


def table(report: Report) -> Table:
    shown = Table(
        *("application", "outputs", "tau", "length", "oracle"),
        *(f"p{quantile * 100:g}" for quantile in QUANTILES),
        *("total", "error", "mean"),
        box=SIMPLE_HEAD,
        padding=0,
        caption=f"Trained on {report.learnt_from} outputs, tested on later ones. tau, length, "
        "oracle: Kendall's tau of actual length and predicted, prompt and expected length. "
        "p50, p90: share of outputs within. total: predicted / actual tokens. error, mean: mean "
        "absolute error in tokens of the predictions, and of a running mean.",
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
