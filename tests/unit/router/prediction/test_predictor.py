"""Predictor of a router: predictions of requests, and learning from ended outputs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from everlift.sampling import Grammar, GrammarKind, SamplingParams
from router.admission.policy import policy_of
from router.admission.queue import AdmissionQueue
from router.admission.request import QueueKey
from router.config import Order, RouterConfig
from router.prediction.model import Model
from router.prediction.predictor import Prediction, Predictor
from router.prediction.trust import kendall_tau
from router.requests.messages import arriving
from tests.support.example_counts import long
from tests.support.router import mixes
from tests.support.router.mixes import Drawn
from tests.support.router.prediction_support import learnt, mixed, predictor, request, served


def predicted(predictor: Predictor, requests: list[Drawn], factor: float = 1.0) -> list[int]:
    """Return the predicted output tokens; each output ends ``factor`` times as long as drawn."""
    tokens = []
    for it in requests:
        prediction = predictor.predict(request(it), it.arrived)
        tokens.append(prediction.output_tokens)
        predictor.note(prediction, max(1, round(factor * it.output_tokens)))
    return tokens


def by_chance(predictor: Predictor, requests: list[Drawn], seed: int = 0) -> None:
    """End the requests with output lengths of random other ones."""
    dice = random.Random(seed)
    for it in requests:
        predictor.note(
            predictor.predict(request(it), it.arrived), dice.choice(requests).output_tokens
        )


def test_predictor_without_model_uses_mean_output_length() -> None:
    bare = predictor(is_loaded=False)
    long, short = mixed(3, 2)
    for tokens in (10, 20, 60):
        bare.note(bare.predict(request(long), 0.0), tokens)
    predictions = [bare.predict(request(it), 0.0) for it in (long, short)]
    assert [it.output_tokens for it in predictions] == [30, 30]
    assert [it.queue_key.predicted_rank for it in predictions] == [0.0, 0.0]
    assert bare.trust is None


def test_prediction_covers_all_choices_and_the_prompt() -> None:
    bare, (it,) = predictor(is_loaded=False), mixed(3, 1)
    three = request(it, n=3, max_tokens=7)
    prediction = bare.predict(three, 0.0)
    assert prediction.output_tokens == 21
    assert prediction.queue_key.predicted_total == 21 + len(three.prompt_ids)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_predicted_work_excludes_cached_prompt_tokens(is_loaded: bool) -> None:
    made, (it,) = predictor(is_loaded=is_loaded), mixed(3, 1)
    asked = request(it, prompt_ids=range(1000), n=2)
    whole, cached = made.predict(asked, 0.0), made.predict(asked, 0.0, cached_tokens=900)
    assert whole.work_tokens == 1000 + whole.output_tokens
    assert (cached.cached_tokens, cached.output_tokens) == (900, whole.output_tokens)
    assert cached.work_tokens == cached.queue_key.predicted_total == 100 + whole.output_tokens
    assert cached.queue_key.predicted_work_rank < whole.queue_key.predicted_work_rank
    # Equal outputs have equal ranks, whatever is cached.
    assert cached.queue_key.predicted_rank == whole.queue_key.predicted_rank


def test_predictor_ignores_outputs_ended_by_max_tokens() -> None:
    bare, (it,) = predictor(is_loaded=False), mixed(3, 1)
    endless = request(it, stop_token_ids=(), max_tokens=5000)
    prediction = bare.predict(endless, 0.0)
    assert prediction.output_tokens == 5000
    bare.note(prediction, 5000)
    assert bare.predict(request(it), 0.0).output_tokens == 128


def test_predictions_correlate_with_actual_lengths() -> None:
    requests = mixed(5, 600)
    tau = kendall_tau([*zip(predicted(predictor(), requests), lengths(requests), strict=True)])
    oracle = kendall_tau([(it.mean_tokens, it.output_tokens) for it in requests])
    assert tau >= 0.85 * oracle > 0.6


def lengths(requests: list[Drawn]) -> list[int]:
    return [it.output_tokens for it in requests]


def test_predicted_rank_is_of_all_choices_together() -> None:
    made, requests = predictor(), mixed(6, 300)
    predicted(made, requests)
    proofs = next(it for it in requests if it.application == "proofs")
    sentiment = next(it for it in requests if it.application == "sentiment")
    assert made.predict(request(sentiment), 0.0).queue_key.predicted_rank < 0.3
    assert made.predict(request(proofs), 0.0).queue_key.predicted_rank > 0.8
    assert made.predict(request(sentiment, n=128), 0.0).queue_key.predicted_rank > 0.5


def test_predictions_follow_growing_output_lengths() -> None:
    made, requests = predictor(), mixed(7, 900)
    tokens = predicted(made, requests, factor=3.0)
    late = slice(600, None)
    assert sum(tokens[late]) == pytest.approx(3 * sum(lengths(requests)[late]), rel=0.35)
    assert made.trust is not None
    assert made.trust.coverage == pytest.approx([0.5, 0.9], abs=0.12)


def test_correction_is_bounded_with_many_in_flight() -> None:
    """Five hundred requests of one template arrive between a prediction and its result."""
    made, requests = predictor(), mixed(2, 2000, [mixes.DIGEST])
    under_way, tokens = deque[Prediction](), list[int]()
    for place, it in enumerate(requests):
        prediction = made.predict(request(it), it.arrived)
        assert prediction.guess is not None
        under_way.append(prediction)
        tokens.append(prediction.guess.tokens)
        if place >= 500:
            made.note(under_way.popleft(), requests[place - 500].output_tokens)
    late = slice(1000, None)
    assert max(tokens[late]) < 2 * min(tokens[late])
    assert sum(tokens[late]) == pytest.approx(sum(lengths(requests)[late]), rel=0.15)
    assert made.trust is not None
    assert made.trust.coverage == pytest.approx([0.5, 0.9], abs=0.12)


def test_predictor_learns_an_unseen_template_quickly() -> None:
    new = mixes.Application("new", "acme", "Be terse. " * 20, (mixes.Kind(("{text}",), 700, 0.2),))
    drawn = mixes.drawn(random.Random(1), [new])
    made, requests = predictor(), [*islice(drawn, 60)]
    tokens = predicted(made, requests)
    assert tokens[-1] == pytest.approx(700, rel=0.5)


def test_bimodal_lengths_are_not_extrapolated() -> None:
    made, (it,) = predictor(), mixed(9, 1)
    for number in range(400):
        made.note(made.predict(request(it), 0.0), 900 if number % 5 == 0 else 2)
    guess = made.predict(request(it), 0.0).guess
    assert guess is not None and 2 <= guess.tokens <= 1000


def test_worthless_predictions_become_constant_and_recover() -> None:
    made, requests = predictor(), mixed(8, 700)
    by_chance(made, requests)
    assert made.trust is not None and not made.trust.is_trusted
    assert abs(made.trust.tau) < 0.1
    predictions = [made.predict(request(it), it.arrived) for it in requests[:50]]
    assert len({it.length for it in predictions}) == 1
    assert {it.queue_key.predicted_rank for it in predictions} == {0.0}
    predicted(made, requests)
    assert made.trust.is_trusted and made.trust.tau > 0.5


def left(
    order: Order, predictor: Predictor, requests: list[Drawn], cached: Sequence[int] = ()
) -> list[int]:
    """Return the numbers of the requests in the order in which they leave the queue.

    They arrive 1 s apart, and leave after a long wait. ``cached`` are their cached prompt tokens,
    0 by default.
    """
    queue = AdmissionQueue(policy_of(order, RouterConfig()), class_floor=0.0)
    for number, it in enumerate(requests):
        made = request(it, request_id=str(number))
        prediction = predictor.predict(made, it.arrived, cached[number] if cached else 0)
        key = prediction.queue_key._replace(estimated_wait_s=50.0)
        prediction = replace(prediction, queue_key=key)
        queue.push(arriving(made, "g", float(number), None, prediction, 0))
    return [int(queue.pop(1000.0).request_id) for _ in requests]


@pytest.mark.parametrize("order", ["shortest", "hrrn"])
def test_cached_long_prompt_leaves_before_a_shorter_one(order: Order) -> None:
    (it,) = mixed(3, 1)
    long, short = (replace(it, prompt="word " * count) for count in (900, 400))
    num_long, num_short = (len(request(each).prompt_ids) for each in (long, short))
    assert num_long > 2 * num_short > 800
    requests = [long, short, long]
    assert left(order, predictor(is_loaded=False), requests) == [1, 0, 2]
    cached = [0, 0, num_long - 30]
    assert left(order, predictor(is_loaded=False), requests, cached) == [2, 1, 0]


def test_ranked_order_ignores_cached_tokens() -> None:
    requests = mixed(8, 30)
    cached = [len(request(it).prompt_ids) * (number % 2) for number, it in enumerate(requests)]
    assert left("ranked", predictor(), requests, cached) == left("ranked", predictor(), requests)


@pytest.mark.parametrize("order", ["shortest", long("ranked"), long("hrrn")])
def test_worthless_predictions_keep_arrival_order(order: Order) -> None:
    made, requests = predictor(), mixed(8, 700)
    some, by_arrival = requests[:30], [*range(30)]
    assert left(order, made, some) != by_arrival
    by_chance(made, requests)
    assert left(order, made, some) == by_arrival
    predicted(made, requests)
    assert left(order, made, some) != by_arrival


def test_certain_lengths_keep_arrival_order() -> None:
    made, requests = predictor(), mixed(8, 700)
    by_chance(made, requests)
    endless = request(requests[0], stop_token_ids=(), max_tokens=5000)
    prediction = made.predict(endless, 0.0)
    assert prediction.queue_key == QueueKey()
    assert prediction.output_tokens == 5000


def test_trust_change_is_reported_once() -> None:
    made, changes = predictor(), 0
    dice, requests = random.Random(0), mixed(8, 700)
    for it in requests:
        prediction = made.predict(request(it), it.arrived)
        changes += made.note(prediction, dice.choice(requests).output_tokens)
    assert changes == 1


def test_least_tokens_is_reached_by_nearly_all_outputs() -> None:
    made, requests = predictor(), mixed(7, 900)
    shorter, least = 0, []
    for number, it in enumerate(requests):
        asked = request(it, request_id=f"r{number}")
        prediction = made.predict(asked, it.arrived)
        least.append(prediction.least_tokens)
        shorter += it.output_tokens < least[-1]
        made.note(prediction, it.output_tokens)
    assert shorter < 0.07 * len(requests)
    assert sum(least) > 0.2 * sum(lengths(requests))


def test_least_tokens_is_waived_for_one_in_twenty_requests() -> None:
    made, requests = predictor(), mixed(6, 300)
    predicted(made, requests)
    proof = next(it for it in requests if it.application == "proofs")
    asked = (request(proof, request_id=f"r{number}") for number in range(2000))
    least = [made.predict(each, 0.0).least_tokens for each in asked]
    assert len(set(least)) == 2 and min(least) == 1
    assert 50 < least.count(1) < 200


def test_least_tokens_follows_min_tokens_and_stop_settings() -> None:
    made, (it,) = predictor(is_loaded=False), mixed(3, 1)

    def least(**changes: Any) -> int:
        asked = request(it, **changes)
        return made.predict(asked, 0.0).least_tokens

    assert least() == 1, "it may end with its first token"
    assert least(sampling=SamplingParams(min_tokens=9)) == 9
    assert least(stop_token_ids=(), max_tokens=5000) == 5000
    grammar = Grammar(GrammarKind.REGEX, ("a+",))
    assert least(stop_token_ids=(), sampling=SamplingParams(grammar=grammar)) == 1


def test_distrusted_model_predicts_no_least_tokens() -> None:
    made, requests = predictor(), mixed(8, 700)
    asked = [request(it, request_id=str(number)) for number, it in enumerate(requests[:50])]
    assert max(made.predict(each, 0.0).least_tokens for each in asked) > 1
    by_chance(made, requests)
    assert {made.predict(each, 0.0).least_tokens for each in asked} == {1}


def test_truncated_output_is_learned_as_a_lower_bound() -> None:
    made, (it,) = predictor(), mixed(9, 1)
    before = made.predict(request(it), 0.0)
    for _ in range(300):
        made.note_cut_off(made.predict(request(it), 0.0), 2000)
    after = made.predict(request(it), 0.0)
    assert after.length.median > 1000 > before.length.median
    assert made.trust is not None and made.trust.coverage == []
    made.note_cut_off(made.predict(request(it, stop_token_ids=()), 0.0), 5)
    made.note_cut_off(after, 1)
    assert made.predict(request(it), 0.0).length == after.length, (
        "it says nothing that it was short"
    )


def test_loaded_model_starts_with_trust_from_training() -> None:
    made, requests = predictor(), mixed(8, 600)
    by_chance(made, requests)
    old = made.predict(request(requests[0]), 0.0)
    model = Model.parse(learnt()[0])
    made.load(model)
    assert made.trust is not None and made.trust.is_trusted and made.trust.tau == model.tau
    made.note(old, 10)
    assert made.trust.coverage == []


def test_predictor_rejects_model_trained_for_other_outputs() -> None:
    made = Predictor(served().tokenizer, "another", 0.1)
    with pytest.raises(ValueError, match=r"for the model '.+', but 'another' is served"):
        made.load(Model.parse(learnt()[0]))
    assert made.trust is None
