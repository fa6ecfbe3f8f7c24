"""Training of a predictor on finished outputs, and its evaluation on later ones."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from math import exp
from random import Random

import pytest

from cluster.errors import ClusterFailed
from cluster.prediction.examples import Example
from cluster.prediction.training import trained
from router.prediction.model import Model
from tests.support.router import mixes
from tests.support.router.prediction_support import examples, learnt, served

#: The lengths of outputs are independent of the prompts.
NOISE = mixes.Application("noise", "acme", "", (mixes.Kind(("{text}",), 100, 1.0),))


def test_training_nears_the_oracle_and_beats_prompt_length() -> None:
    _, report = learnt()
    assert report.learnt_from == 1600 and report.all.outputs == 400
    assert report.all.tau_oracle is not None
    assert report.all.tau >= 0.88 * report.all.tau_oracle
    assert abs(report.all.tau_prompt_length) < 0.5 * report.all.tau
    assert report.all.mean_absolute_error < 0.6 * report.all.mean_absolute_error_of_mean


def test_training_quantiles_cover_their_share_of_outputs() -> None:
    _, report = learnt()
    assert report.all.total_ratio == pytest.approx(1.0, abs=0.2)
    assert report.all.coverage == pytest.approx((0.5, 0.9), abs=0.06)


def test_training_on_noise_has_no_correlation() -> None:
    _, report = learnt(2, 800, (NOISE,))
    assert abs(report.all.tau) < 0.15
    assert report.all.tau_oracle == 0


def test_training_hides_the_other_choices() -> None:
    """All four choices of a prompt are predicted before the length of the first is known."""
    dice, made = Random(4), list[Example]()
    for number in range(400):
        (one,) = examples(number, 1, (NOISE,))
        features, median = (
            one.features._replace(choices=4, arrived=float(number)),
            dice.gauss(4.0, 1.0),
        )
        lengths = (round(exp(dice.gauss(median, 0.1))) for _ in range(4))
        made += (replace(one, features=features, output_tokens=max(1, it)) for it in lengths)
    _, report = trained("m", made)
    assert abs(report.all.tau) < 0.15


def test_training_reports_each_application() -> None:
    _, report = learnt()
    assert set(report.by_application) == {it.name for it in mixes.APPLICATIONS}
    assert sum(it.outputs for it in report.by_application.values()) == report.all.outputs
    assert report.by_application["sentiment"].mean_absolute_error < 5
    assert json.loads(json.dumps(report.plain()))["tau"] == report.all.tau


def test_training_infers_applications_from_prompt_prefixes() -> None:
    _, report = learnt(1, 2000, mixes.APPLICATIONS, False)
    assert report.all.tau_oracle is not None
    assert report.all.tau >= 0.85 * report.all.tau_oracle
    assert not set(report.by_application) & {it.name for it in mixes.APPLICATIONS}
    assert len(report.by_application) >= 3


def test_training_is_deterministic() -> None:
    made = examples(3, 300, mixes.APPLICATIONS)
    assert trained("m", made)[0] == trained("m", made)[0]
    assert Model.parse(trained("m", made)[0]).served == "m"


def test_training_report_omits_an_absent_oracle() -> None:
    made = examples(3, 300, mixes.APPLICATIONS)
    _, report = trained(served().name, [replace(it, expected_tokens=None) for it in made])
    assert report.all.tau_oracle is None


def test_training_rejects_too_few_outputs() -> None:
    with pytest.raises(ClusterFailed, match="199 outputs are too few"):
        trained("m", examples(3, 199, mixes.APPLICATIONS))


def test_mixes_draw_random_lengths_for_equal_prompts() -> None:
    """The lengths contain noise that even the oracle cannot predict."""
    drawn = [*islice(mixes.drawn(Random(1), [mixes.PROOFS]), 400)]
    lengths = sorted(it.output_tokens for it in drawn)
    assert lengths[360] > 3 * lengths[40]
    assert len({it.mean_tokens for it in drawn}) == 1
