"""How good a predictor is on outputs that it was not trained with. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import log
from typing import Any

from cluster.prediction.examples import Example, by_request
from router.prediction.asked import narrowest
from router.prediction.learned import Guess, Learned
from router.prediction.model import QUANTILES
from router.prediction.output_lengths import OutputLengths
from router.prediction.rank_correlation import kendall_tau


@dataclass(frozen=True, slots=True)
class Figures:
    """Of ``outputs``: Kendall's tau between their lengths and what was predicted, by the model, by
    the prompts' lengths alone, and by who knew what to expect (None where nobody did); the part
    that stayed within each quantile; all predictions together over all lengths together; the mean
    absolute error in tokens, and that of a mean of the outputs before."""

    outputs: int
    tau: float
    tau_prompt_length: float
    tau_oracle: float | None
    coverage: tuple[float, ...]
    total_ratio: float
    mean_absolute_error: float
    mean_absolute_error_of_mean: float


@dataclass(frozen=True, slots=True)
class _Seen:
    example: Example
    guess: Guess
    mean: float


@dataclass(frozen=True, slots=True)
class Report:
    """Of what came after the examples that were learnt from. An application without a name is the
    narrowest group that its requests are of."""

    learnt_from: int
    all: Figures
    by_application: dict[str, Figures]

    def plain(self) -> dict[str, Any]:
        """As it is kept with a model."""
        groups = {name: asdict(figures) for name, figures in self.by_application.items()}
        return {
            "learnt_from": self.learnt_from,
            "quantiles": QUANTILES,
            **asdict(self.all),
            "by_application": groups,
        }


def examine(learned: Learned, held_out: Sequence[Example], learnt_from: int) -> Report:
    """``held_out`` are by arrival; each request's are told as ended before the next one is asked
    about, so that what is corrected in service is corrected here."""
    mean, seen = OutputLengths(), list[_Seen]()
    for asked, outputs in by_request(held_out):
        guess = learned.guess(asked)
        seen += [_Seen(output, guess, mean.mean) for output in outputs]
        for output in outputs:
            learned.note(guess, output.output_tokens)
            mean.note(output.output_tokens)
    groups = defaultdict(list)
    for each in seen:
        groups[each.example.application or narrowest(each.example.asked.groups)].append(each)
    return Report(learnt_from, _figures(seen), {name: _figures(groups[name]) for name in groups})


def _figures(seen: Sequence[_Seen]) -> Figures:
    lengths = [each.example.output_tokens for each in seen]
    tokens = [each.guess.tokens for each in seen]
    expected = [each.example.expected_tokens for each in seen]
    known = [it for it in expected if it is not None]
    count = len(seen)
    return Figures(
        outputs=count,
        tau=kendall_tau([*zip(tokens, lengths, strict=True)]),
        tau_prompt_length=kendall_tau(
            [*zip((each.example.prompt_tokens for each in seen), lengths, strict=True)]
        ),
        tau_oracle=(
            kendall_tau([*zip(known, lengths, strict=True)]) if len(known) == count else None
        ),
        coverage=tuple(
            _mean(log(each.example.output_tokens) <= each.guess.logs[place] for each in seen)
            for place in range(len(QUANTILES))
        ),
        total_ratio=sum(tokens) / sum(lengths),
        mean_absolute_error=_mean(abs(a - b) for a, b in zip(tokens, lengths, strict=True)),
        mean_absolute_error_of_mean=_mean(
            abs(each.mean - each.example.output_tokens) for each in seen
        ),
    )


def _mean(values: Iterable[float]) -> float:
    told = list(values)
    return sum(told) / len(told)
