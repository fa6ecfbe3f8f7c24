"""Sampler, compared with transformers: each feature affects its own row only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from everlift.errors import EngineFailed, InvalidRequest
from everlift.sampling import Grammar, GrammarKind, SamplingParams, TokenLogprobs
from tests.support.example_counts import examples, long, one_in
from tests.support.worker.llama_support import warped
from tests.support.worker.sampling_oracle import is_close, own_logprobs, shaped
from tests.support.worker.sampling_support import FakeGrammar, FakeMatcher, admission
from worker.device.streams import HostCopy
from worker.device.upload import Parcel
from worker.engine.plan import Admission, RowResult
from worker.runner.history import Histories, PenalisedRow
from worker.runner.sampler import Sampler, SamplingRequest, SamplingRequests

CPU = torch.device("cpu")
#: Tokens of two words of a mask, the second of which is partial.
VOCAB = 40
PROMPT = (3, 3, 9, 21, 38)
OUTPUT = (7, 9, 7, 30, 7)
GREEDY = SamplingParams(temperature=0.0)
GRAMMAR = Grammar(GrammarKind.REGEX, ("as the fake grammar says",))
STOPS = (5, 33)

FEATURES: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": ((0, 3.5), (9, -100.0), (33, 0.25), (39, 100.0))},
    "repetition": {"repetition_penalty": 1.7},
    "encouraged repetition": {"repetition_penalty": 0.4},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": -1.5},
    "min_tokens": {"min_tokens": 6},
    "grammar": {"grammar": GRAMMAR},
    "allowed": {"allowed_token_ids": (1, 5, 9, 30, 39)},
    "banned": {"banned_sequences": ((30, 7, 12), (8,), (9, 9), (7, 30), (1, 30, 7, 2), (7, 7))},
    "all": {
        "logit_bias": ((7, -2.0), (12, 2.0)),
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.3,
        "presence_penalty": 0.8,
        "min_tokens": 100,
        "grammar": GRAMMAR,
        "allowed_token_ids": tuple(range(2, VOCAB)),
        "banned_sequences": ((7, 13), (14,), (15,)),
    },
}


def some_tokens(output: Sequence[int]) -> set[int]:
    """Return the tokens that the grammar allows after ``output``, including all stop tokens."""
    last = output[-1] if output else 0
    return {token for token in range(VOCAB) if (token + last) % 3} | {*STOPS}


def params(feature: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**(feature | more))


def admit(
    sampling: SamplingParams, prompt: Iterable[int] = PROMPT, **fields: Any
) -> tuple[Admission, Callable[[Sequence[int]], set[int]] | None]:
    """Return an admission, and the function of the tokens that its grammar allows."""
    allowed = some_tokens if sampling.grammar else None
    grammar = FakeGrammar(allowed) if allowed else None
    return admission(sampling, prompt, stops=STOPS, grammar=grammar, **fields), allowed


def logits(rows: int, seed: int = 3) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sampler(*admissions: Admission) -> Sampler:
    this_sampler = Sampler(VOCAB, CPU)
    for each in admissions:
        this_sampler.admit(each)
    return this_sampler


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("feature", FEATURES)
def test_sampler_logits_match_transformers(feature: str, temperature: float) -> None:
    this, allowed = admit(params(FEATURES[feature], temperature=temperature), output=OUTPUT)
    scores = logits(1)
    expected = shaped(scores[0], this, allowed)
    assert not torch.equal(expected, scores[0])
    (result,) = sampler(this).sample(scores, SamplingRequests.of([SamplingRequest(0, len(OUTPUT))]))
    torch.testing.assert_close(scores[0], expected)
    if not temperature:
        assert result.tokens == (int(expected.argmax()),)


@pytest.mark.parametrize("feature", FEATURES)
def test_sampler_counts_sampled_tokens_like_given_output(feature: str) -> None:
    sampling = params({"min_tokens": 12} | FEATURES[feature], temperature=1.5, seed=4)
    this, allowed = admit(sampling)
    before, _ = admit(params(FEATURES["frequency"]), output=[*range(VOCAB)] * 2)
    this_sampler, output = sampler(before, this), list[int]()
    for position in range(12):
        scores = logits(1, seed=position)
        known = replace(this, tokens=(*PROMPT, *output))
        expected = shaped(scores[0], known, allowed)
        (result,) = this_sampler.sample(scores, SamplingRequests.of([SamplingRequest(0, position)]))
        torch.testing.assert_close(scores[0], expected)
        output += result.tokens


def test_sampler_release_drops_grammar_matcher() -> None:
    stopping, refusing = FakeGrammar(lambda output: STOPS), FakeGrammar(lambda output: ())
    for grammar in (stopping, refusing):
        this_sampler = sampler(
            admission(SamplingParams(grammar=GRAMMAR), stops=STOPS, grammar=grammar)
        )
        this_sampler.sample(logits(1), SamplingRequests.of([SamplingRequest(0, 0)]))
        assert len(grammar.matchers) == 1
        this_sampler.release(0)
        assert len(grammar.matchers) == 0


def test_sampler_slot_is_unready_while_its_grammar_is() -> None:
    grammar = FakeGrammar(lambda output: STOPS)
    this_sampler = sampler(admission(SamplingParams(grammar=GRAMMAR), stops=STOPS, grammar=grammar))
    assert this_sampler.unready_slots() == frozenset()
    (matcher,) = grammar.matchers
    matcher.ready = False
    assert this_sampler.unready_slots() == {0}
    this_sampler.release(0)
    assert this_sampler.unready_slots() == frozenset()


def test_sampler_slot_reuse_clears_state() -> None:
    first, _ = admit(params(FEATURES["all"]), output=OUTPUT)
    this_sampler = sampler(first)
    this_sampler.sample(logits(1), SamplingRequests.of([SamplingRequest(0, len(OUTPUT))]))
    for feature in FEATURES.values():
        this, allowed = admit(params(feature), prompt=(1, 2), output=(4, 4))
        this_sampler.admit(this)
        scores = logits(1)
        expected = shaped(scores[0], this, allowed)
        this_sampler.sample(scores, SamplingRequests.of([SamplingRequest(0, 2)]))
        torch.testing.assert_close(scores[0], expected)
    plain, _ = admit(SamplingParams())
    this_sampler.admit(plain)
    scores = logits(1)
    this_sampler.sample(scores, SamplingRequests.of([SamplingRequest(0, 0)]))
    assert torch.equal(scores, logits(1))


def test_sampler_histories_are_separate_per_slot() -> None:
    rng = Random(5)
    this_sampler, expected, scores = Sampler(VOCAB, CPU), [], logits(30)
    for slot in rng.sample(range(30), 30):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 90))]
        cut = rng.randrange(1, len(tokens) + 1)
        penalties = params(FEATURES["all"], grammar=None)
        this, _ = admit(penalties, prompt=tokens[:cut], output=tokens[cut:], slot=slot)
        this_sampler.admit(this)
        expected.append((slot, len(tokens) - cut, shaped(scores[slot], this)))
    expected.sort(key=lambda each: each[0])
    this_sampler.sample(
        scores,
        SamplingRequests.of([SamplingRequest(slot, position) for slot, position, _ in expected]),
    )
    torch.testing.assert_close(scores, torch.stack([each for *_, each in expected]))


def test_sampler_ignores_tokens_outside_vocabulary() -> None:
    sampling = SamplingParams(logit_bias=((VOCAB, 5.0), (10**6, 5.0)), min_tokens=3)
    scores = logits(1)
    (result,) = sampler(admission(sampling, stops=[VOCAB + 7])).sample(
        scores, SamplingRequests.of([SamplingRequest(0, 0)])
    )
    assert torch.equal(scores, logits(1))
    assert result.error is None


def test_stop_token_is_masked_beside_an_unknown_one() -> None:
    scores = logits(1)
    this = admission(SamplingParams(min_tokens=3), stops=[5, VOCAB + 7])
    sampler(this).sample(scores, SamplingRequests.of([SamplingRequest(0, 0)]))
    assert scores.isneginf().nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("feature", one_in(2, FEATURES), ids=FEATURES)
@pytest.mark.parametrize("filters", [{}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}], ids=len)
def test_sampler_follows_shaped_distribution(feature: str, filters: dict[str, Any]) -> None:
    sampling = params(FEATURES[feature], temperature=1.2, **filters)
    sampling = replace(sampling, min_tokens=1 << 20 if sampling.min_tokens else 0, grammar=None)
    this, _ = admit(sampling, output=OUTPUT)
    probabilities = warped(shaped(logits(1)[0], this)[None], sampling)[0].double().softmax(-1)
    draws = 8000
    scores = logits(1).expand(draws, -1).contiguous()
    results = sampler(this).sample(
        scores, SamplingRequests.of([SamplingRequest(0, i) for i in range(draws)])
    )
    counts = torch.tensor([result.tokens[0] for result in results]).bincount(minlength=VOCAB)
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = probabilities[possible] * draws
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * max(freedom, 1))


# neighbours


def mixed_batch() -> list[tuple[Admission, SamplingRequest]]:
    """Return rows with different parameters: some have drafts, and one has no feature."""
    rng = Random(8)
    batch = [(admission(SamplingParams(seed=99), PROMPT), SamplingRequest(0, 0))]
    for slot, feature in enumerate([*FEATURES.values()] * 3, 1):
        sampling = params(
            feature,
            temperature=rng.choice([0.0, 0.6, 1.4]),
            top_p=rng.choice([1.0, 0.9]),
            seed=slot,
            logprobs=rng.choice([None, 0, 3]),
        )
        output = [rng.choice(OUTPUT) for _ in range(rng.randrange(6))]
        this, _ = admit(sampling, output=output, slot=slot, choice=slot % 2)
        plain = this, SamplingRequest(slot, len(output))
        drafts = sampled([plain])[slot].tokens + tuple(rng.choices(range(VOCAB), k=2))
        batch.append(rng.choice([plain, (this, SamplingRequest(slot, len(output), drafts))]))
    return batch


def rows_of(batch: Iterable[tuple[Admission, SamplingRequest]]) -> Tensor:
    """Return logits that depend on the slot only, not on the batch."""
    return torch.cat([logits(4, seed=ask.slot)[: 1 + len(ask.drafts)] for _, ask in batch])


def requests_of(batch: Iterable[tuple[Admission, SamplingRequest]]) -> SamplingRequests:
    return SamplingRequests.of([ask for _, ask in batch])


def sampled(batch: Sequence[tuple[Admission, SamplingRequest]]) -> dict[int, RowResult]:
    results = sampler(*(this for this, _ in batch)).sample(
        rows_of(batch), SamplingRequests.of([ask for _, ask in batch])
    )
    return {ask.slot: result for (_, ask), result in zip(batch, results, strict=True)}


def test_sampler_is_batch_invariant() -> None:
    together = sampled(mixed_batch())
    backwards = sampled(mixed_batch()[::-1])
    alone = {ask.slot: sampled([(this, ask)])[ask.slot] for this, ask in mixed_batch()}
    assert all(result.tokens for result in together.values())
    assert {len(result.tokens) for result in together.values()} >= {1, 2}
    assert together == backwards == alone


@pytest.mark.parametrize("broken", [math.nan, long(math.inf)])
def test_sampler_confines_nonfinite_logits_to_their_row(broken: float) -> None:
    whole = sampled(mixed_batch())
    for victim in range(len(whole)):
        batch = mixed_batch()
        scores = rows_of(batch)
        first = sum(1 + len(ask.drafts) for _, ask in batch[:victim])
        scores[first, VOCAB - 1] = broken  # a token that some masks exclude
        results = sampler(*(this for this, _ in batch)).sample(
            scores, SamplingRequests.of([ask for _, ask in batch])
        )
        for slot, result in enumerate(results):
            if slot == victim:
                assert isinstance(result.error, EngineFailed)
                assert str(result.error) == "the model's logits are not finite numbers"
                assert not result.tokens
            else:
                assert result == whole[slot]


class Counted(TorchDispatchMode):
    """Dispatch mode that records the calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def calls(rows: int, **fields: Any) -> list[str]:
    batch = [
        (
            admission(SamplingParams(**fields), PROMPT, OUTPUT, slot, stops=STOPS),
            SamplingRequest(slot, 5),
        )
        for slot in range(rows)
    ]
    this_sampler, scores = sampler(*(this for this, _ in batch)), rows_of(batch)
    with Counted() as counted:
        this_sampler.sample(scores, requests_of(batch))
    return counted.calls


def test_sampler_torch_calls_are_independent_of_row_count() -> None:
    feature = FEATURES["all"] | {"grammar": None, "logprobs": 2, "top_p": 0.5}
    assert calls(3, **feature) == calls(30, **feature)


def test_sampler_skips_unused_features() -> None:
    assert not {*calls(3, temperature=0.0)} & {
        "aten.topk.default",
        "aten.logsumexp.default",
        "aten.index_put_.default",
        "aten.exp.default",
        "aten.cumsum.default",
    }
    assert "aten.topk.default" not in calls(3)


#: Operations that make the host wait for the device.
WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default"}


def test_sampler_waits_for_device_only_at_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = [(this, ask) for this, ask in mixed_batch() if not ask.drafts]
    expected, waited = [*sampled(batch).values()], list[tuple[int, ...]]()

    class Noted(HostCopy):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            self._shape = tuple(tensor.shape)

        def wait(self) -> list[Any]:
            waited.append(self._shape)
            return super().wait()

    monkeypatch.setattr("worker.runner.logprobs.HostCopy", Noted)
    monkeypatch.setattr("worker.runner.sampled_tokens.HostCopy", Noted)
    this_sampler, counted = sampler(*(this for this, _ in batch)), Counted()
    backend = this_sampler._backend

    def backend_uncounted(*args: Any) -> Any:
        """Return the backend without counting its calls: a kernel samples on a GPU."""
        sample = backend(*args)

        def uncounted(scores: Tensor) -> Tensor:
            before = len(counted.calls)
            tokens = sample(scores)
            del counted.calls[before:]
            return tokens

        return uncounted

    this_sampler._backend = backend_uncounted
    with counted:
        prepared = this_sampler.prepare(requests_of(batch), Parcel(torch.device("cpu")))
        tokens = this_sampler.launch(rows_of(batch), prepared)
    assert not waited
    assert not WAITS & {*counted.calls}
    scored = [this for this, _ in batch if this.sampling.logprobs is not None]
    results = tokens.results()
    assert waited == [(len(batch),), (len(scored), 2 + 2 * 3)]
    assert results == expected


# drafts

WORDS = 12
#: Logits of the next token, which depend on the last two tokens.
LANGUAGE = torch.randn(WORDS, WORDS, WORDS, generator=torch.Generator().manual_seed(6)) * 1.5


@dataclass
class Generation:
    """Sequence that is generated step by step; ``propose`` makes drafts from all its tokens."""

    sampling: SamplingParams
    propose: Callable[[list[int]], Iterable[int]] = lambda tokens: ()
    prompt: tuple[int, ...] = (1, 2, 2, 7)
    stops: tuple[int, ...] = (3,)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: int = 0

    def run(self, count: int) -> Generation:
        self.tokens = [*self.prompt]
        this = admission(
            self.sampling,
            self.prompt,
            stops=self.stops,
            grammar=FakeGrammar(lambda output: {t for t in range(WORDS) if t != sum(output) % 7}),
        )
        this_sampler = Sampler(WORDS, CPU)
        this_sampler.admit(this)
        while len(self.tokens) < len(self.prompt) + count and self.tokens[-1] not in self.stops:
            self._step(this_sampler)
        return self

    def _step(self, this_sampler: Sampler) -> None:
        drafts = tuple(self.propose(self.tokens))
        seen = [*self.tokens, *drafts]
        scores = torch.stack(
            [LANGUAGE[seen[i - 2], seen[i - 1]] for i in range(len(self.tokens), len(seen) + 1)]
        )
        ask = SamplingRequest(0, len(self.tokens) - len(self.prompt), drafts)
        (result,) = this_sampler.sample(scores, SamplingRequests.of([ask]))
        assert result.error is None
        self.tokens += result.tokens
        self.logprobs += result.logprobs
        self.steps += 1


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5]),
    seed=st.integers(0, 1000),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([(), ((4, 1.0), (5, -1.0))]),
    min_tokens=st.sampled_from([0, 9]),
    logprobs=st.sampled_from([None, 2]),
    grammar=st.sampled_from([None, GRAMMAR]),
    allowed_token_ids=st.sampled_from([(), (1, 2, 3, 4, 5, 6, 8)]),
    banned_sequences=st.sampled_from([(), ((4,), (5, 6)), ((1, 2, 4), (2, 2), (6, 1), (8, 8, 8))]),
)


@settings(max_examples=examples(60))
@given(samplings, st.randoms(use_true_random=False))
def test_sampler_drafts_change_no_token(sampling: SamplingParams, rng: Random) -> None:
    plain = Generation(sampling).run(16)
    future = plain.tokens

    def right(tokens: list[int]) -> list[int]:
        return future[len(tokens) : len(tokens) + 3]

    def noise(tokens: list[int]) -> list[int]:
        return [rng.randrange(WORDS) for _ in range(rng.randrange(4))]

    def half_right(tokens: list[int]) -> list[int]:
        return [t if rng.random() < 0.7 else rng.randrange(WORDS) for t in right(tokens)]

    def right_and_on(tokens: list[int]) -> list[int]:
        return [*right(tokens), *noise(tokens)]

    for propose in (right, noise, half_right, right_and_on):
        drafted = Generation(sampling, propose).run(16)
        assert drafted.tokens[: len(future)] == future, propose.__name__
        assert drafted.logprobs[: len(plain.logprobs)] == plain.logprobs
    # A row with three correct drafts yields four tokens.
    assert Generation(sampling, right).run(16).steps == math.ceil((len(future) - 4) / 4)


def test_sampler_rejects_drafts_outside_grammar() -> None:
    class Cautious(FakeMatcher):
        def mask(self, drafts: Sequence[int], into: Tensor, waiting_since: float) -> int:
            return min(1, super().mask(drafts, into, waiting_since))

    class CautiousGrammar(FakeGrammar):
        def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> FakeMatcher:
            return Cautious(lambda output: range(VOCAB), [*output])

    sampling = SamplingParams(temperature=0.0, grammar=GRAMMAR)
    grammar = CautiousGrammar(lambda output: range(VOCAB))
    scores = torch.zeros(4, VOCAB)
    scores[[0, 1, 2, 3], [8, 9, 10, 11]] = 1.0
    this_sampler = sampler(admission(sampling, grammar=grammar))
    assert this_sampler.sample(
        scores, SamplingRequests.of([SamplingRequest(0, 0, (8, 9, 10))])
    ) == [RowResult((8, 9))]


def test_sampler_returns_nothing_after_stop_token() -> None:
    this = admission(params({}, temperature=0.0), stops=STOPS)
    scores = torch.zeros(3, VOCAB)
    scores[[0, 1, 2], [8, 5, 9]] = 1.0
    (result,) = sampler(this).sample(scores, SamplingRequests.of([SamplingRequest(0, 0, (8, 5))]))
    assert result.tokens == (8, 5)


def test_nonfinite_logits_after_draft_fail_next_step() -> None:
    this = admission(GREEDY)
    this_sampler = sampler(this)
    scores = torch.zeros(3, VOCAB)
    scores[[0, 1], [8, 7]] = 1.0
    scores[2] = math.nan
    assert this_sampler.sample(scores, SamplingRequests.of([SamplingRequest(0, 0, (8, 7))])) == [
        RowResult((8, 7))
    ]
    (result,) = this_sampler.sample(
        torch.full((1, VOCAB), math.nan), SamplingRequests.of([SamplingRequest(0, 2)])
    )
    assert isinstance(result.error, EngineFailed)


# log probabilities


def test_sampler_logprobs_are_of_unshaped_logits() -> None:
    for slot, feature in enumerate(FEATURES.values()):
        for num_top in (0, 1, 5, 20):
            sampling = params(feature, temperature=0.8, seed=slot, logprobs=num_top)
            this, _ = admit(sampling, output=OUTPUT)
            (result,) = sampler(this).sample(
                logits(1), SamplingRequests.of([SamplingRequest(0, len(OUTPUT))])
            )
            expected = own_logprobs(logits(1)[0], result.tokens[0], num_top)
            assert len(expected.top) == num_top
            assert is_close(result.logprobs, [expected])


def test_sampler_logprobs_are_capped_by_vocabulary() -> None:
    this_sampler = Sampler(8, CPU)
    this_sampler.admit(admission(SamplingParams(logprobs=20)))
    (result,) = this_sampler.sample(logits(1)[:, :8], SamplingRequests.of([SamplingRequest(0, 0)]))
    assert is_close(result.logprobs, [own_logprobs(logits(1)[0, :8], result.tokens[0], 20)])


def test_logprob_rank_is_shared_by_ties() -> None:
    scores = torch.tensor([[2.0, 1.0, 2.0]])
    this_sampler = Sampler(3, CPU)
    this_sampler.admit(
        admission(SamplingParams(temperature=0.0, logprobs=0, logit_bias=((2, 1.0),)))
    )
    (result,) = this_sampler.sample(scores, SamplingRequests.of([SamplingRequest(0, 0)]))
    assert (result.tokens, result.logprobs[0].rank) == ((2,), 1)


# failures


def failure(this: Admission, drafts: tuple[int, ...] = ()) -> str:
    """Return the cause of the failure; a neighbour must not be affected."""
    ask = SamplingRequest(0, 0, drafts)
    neighbour = admission(GREEDY, slot=1)
    scores = logits(2 + len(ask.drafts))
    best = int(scores[-1].argmax())
    result, other = sampler(this, neighbour).sample(
        scores, SamplingRequests.of([ask, SamplingRequest(1, 0)])
    )
    assert other == RowResult((best,))
    assert not result.tokens and not result.logprobs
    return str(result.error)


def test_sampler_row_without_tokens_fails_with_cause() -> None:
    only_stops = FakeGrammar(lambda output: STOPS)
    sampling = SamplingParams(grammar=GRAMMAR, min_tokens=1, logprobs=1)
    this = admission(sampling, stops=STOPS, grammar=only_stops)
    assert failure(this) == "no token is left to sample: excluded by the grammar and min_tokens"
    later = replace(this, tokens=(1, 2))
    (result,) = sampler(later).sample(logits(1), SamplingRequests.of([SamplingRequest(0, 1)]))
    assert result.tokens[0] in STOPS
    nothing = FakeGrammar(lambda output: ())
    assert failure(replace(later, grammar=nothing)) == (
        "no token is left to sample: excluded by the grammar and min_tokens"
    )
    unbound = replace(later, grammar=nothing, sampling=SamplingParams(grammar=GRAMMAR))
    assert failure(unbound) == "no token is left to sample: excluded by the grammar"
    restricted = SamplingParams(allowed_token_ids=(4, 6), banned_sequences=((4,), (1, 6)))
    assert failure(admission(restricted, output=(1,))) == (
        "no token is left to sample: excluded by allowed_token_ids and bad_words"
    )
    every = admission(SamplingParams(min_tokens=1), stops=range(VOCAB))
    assert failure(every) == "no token is left to sample: excluded by min_tokens"


class Failing(FakeGrammar):
    """Grammar that fails in ``matcher``, or in a method of the matcher."""

    def __init__(self, method: str) -> None:
        super().__init__(some_tokens)
        self._method = method

    def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> FakeMatcher:
        matcher = super().matcher(stop_token_ids, output)
        if self._method == "matcher":
            self._fail()
        setattr(matcher, self._method, self._fail)
        return matcher

    def _fail(self, *_: object) -> None:
        raise InvalidRequest(f"in {self._method}")


@pytest.mark.parametrize("method", ["matcher", "mask"])
def test_sampler_grammar_error_fails_its_own_row(method: str) -> None:
    this = admission(SamplingParams(grammar=GRAMMAR), grammar=Failing(method))
    assert failure(this) == f"in {method}"
    assert failure(this, (4, 9)) == f"in {method}"


def test_sampler_masks_of_a_step_share_start_time() -> None:
    times: list[float] = []

    class Watched(FakeGrammar):
        def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> FakeMatcher:
            matcher = super().matcher(stop_token_ids, output)
            mask = matcher.mask

            def watched(drafts: Sequence[int], into: Tensor, waiting_since: float) -> int:
                times.append(waiting_since)
                return mask(drafts, into, waiting_since)

            matcher.mask = watched  # type: ignore[method-assign]
            return matcher

    sampling = SamplingParams(temperature=0.0, grammar=GRAMMAR)
    grammar = Watched(lambda output: range(VOCAB))
    this_sampler = sampler(*(admission(sampling, slot=slot, grammar=grammar) for slot in range(3)))
    for position in range(2):
        this_sampler.sample(
            logits(3), SamplingRequests.of([SamplingRequest(slot, position) for slot in range(3)])
        )
    assert len(times) == 6
    assert len({*times[:3]}) == len({*times[3:]}) == 1 and times[0] < times[3]


def test_sampler_fails_row_with_uncompiled_grammar() -> None:
    assert (
        failure(admission(SamplingParams(grammar=GRAMMAR)))
        == "the sequence's grammar was not compiled"
    )


def test_histories_reserve_room_before_token_is_known() -> None:
    """Memory must not run out when a step is committed, because that cannot be undone."""
    penalised = SamplingParams(presence_penalty=0.5)
    histories = Histories(CPU)
    histories.admit(admission(penalised))
    for token in range(VOCAB):
        histories.penalise(torch.zeros(1, VOCAB), [PenalisedRow(0, 0, penalised)])
        tables = histories._tokens
        histories.advance([(0, (token,))])
        assert histories._tokens is tables
    assert len(tables[0].unique()) == VOCAB
