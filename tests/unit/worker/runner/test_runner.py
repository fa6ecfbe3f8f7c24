"""Work of the torch runner around the model: copies, logits, chunks, and broadcasts.

The model here is a table: a token's logits depend on that token alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from everlift.errors import EngineFailed, InvalidRequest
from everlift.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.worker.sampling_oracle import is_close, own_logprobs
from tests.support.worker.sampling_support import FakeGrammar, admission
from worker.device.kv_cache import KVCache
from worker.device.streams import HostCopy
from worker.engine.plan import UNKNOWN, Admission, BlockCopy, DeviceLost, Plan, Row, RowResult, Rows
from worker.model.layers import Placement
from worker.parallel.agreement import FAILED, NO_TOKEN
from worker.parallel.group import Group
from worker.runner import prompt_scores
from worker.runner.host_cache import HostCache
from worker.runner.runner import TorchRunner
from worker.runner.sampled_tokens import LastTokens

VOCAB = 50
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
GREEDY = SamplingParams(temperature=0.0)
PROMPT = (4, 8, 15, 16, 23, 42, 7)
SCORES = SamplingParams(temperature=0.0, prompt_logprobs=2)


def best(token: int) -> int:
    """Return the greedy token after ``token``."""
    return int(TABLE[token].argmax())


class TableModel:
    """Model whose logits are a table; records its calls, and the rows of logits, in ``log``."""

    def __init__(self, rank: int = 0, log: list[Any] | None = None) -> None:
        self.table = TABLE.clone()
        self.log = [] if log is None else log
        self.seen: list[list[int]] = []
        self.adapters: list[Any] = []
        self._rank = rank

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: object,
        sites: Tensor | None = None,
        adapters: object = None,
    ) -> Tensor:
        self.log.append("forward")
        self.seen.append(tokens.tolist())
        self.adapters.append(adapters)
        return tokens.unsqueeze(1) if sites is None else tokens[sites].unsqueeze(1)

    def logits(self, hidden: Tensor) -> Tensor | None:
        self.log.append(hidden[:, 0].tolist())
        return None if self._rank else self.table[hidden[:, 0]]


class NoAttention:
    def prepare(self, rows: Rows, parcel: object) -> Any:
        return None


class LoggedHost:
    """HostCache that records its copies."""

    num_blocks = 5

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def save(self, copies: Iterable[BlockCopy]) -> None:
        self._log.append(("save", *copies))

    def load(self, copies: Iterable[BlockCopy]) -> None:
        self._log.append(("load", *copies))


class OneOfTwo(Group):
    """Rank 0, which records its broadcasts, or rank 1, which receives ``word``."""

    size = 2

    def __init__(self, rank: int, word: list[Any] | None = None) -> None:
        self.rank = rank
        self.broadcasts: list[list[Any]] = []
        self._word = word

    def broadcast(self, tensor: Tensor) -> Tensor:
        if self.rank == 0:
            self.broadcasts.append(tensor.tolist())
        else:
            word = torch.tensor(self._word)
            assert word.shape == tensor.shape and word.dtype == tensor.dtype
            tensor.copy_(word)
        return tensor


def build(
    model: TableModel | None = None,
    group: Group | None = None,
    host: HostCache | None = None,
    last_tokens: LastTokens | None = None,
    adapters: Sequence[str] = (),
) -> TorchRunner:
    place = Placement(group or Group.single(), torch.float32, torch.device("cpu"))
    cache = KVCache(3, 1, 1, 4, torch.float32, place.device)
    model = model or TableModel(place.group.rank)
    attention: Any = NoAttention()
    host_cache: Any = host
    slots: Any = SimpleNamespace(numbers={digest: i for i, digest in enumerate(adapters, 1)})
    return TorchRunner(
        VOCAB,
        400,
        model,
        cache,
        attention,
        place,
        host_cache,
        last_tokens=last_tokens,
        adapters=slots,
    )


def row(slot: int, tokens: Sequence[int], start: int = 0, samples: bool = True, **more: Any) -> Row:
    return Row(slot, tuple(tokens), start, (0,) * 20, samples, **more)


def plan(*rows: Row, admissions: Iterable[Admission] = (), **more: Any) -> Plan:
    return Plan(1, Rows.of(rows), tuple(admissions), **more)


def test_runner_saves_then_loads_before_forward() -> None:
    log: list[Any] = []
    runner = build(TableModel(log=log), host=LoggedHost(log))
    assert runner.num_host_blocks == 5
    save, load = BlockCopy(1, 4), BlockCopy(2, 0)
    admitted = [admission(GREEDY, PROMPT)]
    runner.execute(plan(row(0, PROMPT), admissions=admitted, saves=(save,), loads=(load,)))
    assert log[:3] == [("save", save), ("load", load), "forward"]


class Greedy(TableModel):
    """Model that raises ``error``, or allocates more memory than any machine has."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        super().__init__()
        self._error = error

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: object,
        sites: Tensor | None = None,
        adapters: object = None,
    ) -> Tensor:
        if self._error is not None:
            raise self._error
        return torch.empty(1 << 44)


@pytest.mark.parametrize(
    "error",
    [
        None,
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_runner_raises_memory_error_on_out_of_memory(error: RuntimeError | None) -> None:
    """The error is recognised on a CPU, where only torch's text shows it, and on a GPU."""
    plan = Plan(1, Rows.of([row(0, PROMPT)]), (admission(GREEDY),))
    with pytest.raises(MemoryError, match=r"memory|ALLOC"):
        build(Greedy(error)).execute(plan)


@pytest.mark.parametrize(
    "says", ["no kernel", "ncclUnhandledCudaError: Cuda failure 2 'out of memory'"]
)
def test_runner_keeps_errors_unrelated_to_memory(says: str) -> None:
    plan = Plan(1, Rows.of([row(0, PROMPT)]), (admission(GREEDY),))
    with pytest.raises(RuntimeError, match=says[:9]):
        build(Greedy(RuntimeError(says))).execute(plan)


class Unreachable:
    """HostCache on a failed device."""

    num_blocks = 1

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def save(self, copies: Sequence[BlockCopy]) -> None:
        raise self._error

    def load(self, copies: Sequence[BlockCopy]) -> None:
        raise self._error


@pytest.mark.parametrize("goes_on", [True, False])
def test_runner_checks_for_lost_device_after_error(
    goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access\nCompile with DSA")
    runner = build(host=Unreachable(error))
    runner.device = torch.device("cuda")

    def synchronize(device: torch.device) -> None:
        if not goes_on:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(Exception, match="illegal memory access") as raised:
        runner.execute(Plan(1, Rows.of([row(0, PROMPT)]), (admission(GREEDY),)))
    if goes_on:
        assert raised.value is error
    else:
        assert isinstance(raised.value, DeviceLost)
        assert str(raised.value) == "CUDA error: an illegal memory access"


def test_runner_release_drops_grammar_state() -> None:
    grammar = FakeGrammar(lambda output: (1, 2))
    params = SamplingParams(grammar=Grammar(GrammarKind.REGEX, (".*",)))
    runner = build()
    runner.execute(
        Plan(1, Rows.of([row(0, PROMPT)]), (admission(params, stops=(3,), grammar=grammar),))
    )
    assert len(grammar.matchers) == 1
    runner.release([0, 5])
    assert len(grammar.matchers) == 0
    assert runner.unready_slots() == frozenset()


def test_runner_without_host_cache_has_no_host_blocks() -> None:
    assert build().num_host_blocks == 0


def test_runner_computes_only_needed_logits() -> None:
    model = TableModel()
    runner = build(model)
    admissions = [
        admission(GREEDY, PROMPT, slot=0),
        admission(GREEDY, (1, 2, 3), slot=1),
        admission(SCORES, PROMPT, slot=2),
    ]
    rows = (
        row(1, (3, 11, 12), start=2, num_drafts=2),
        row(0, PROMPT[:3], samples=False),
        row(2, PROMPT[:4], samples=False, scores_prompt=True),
    )
    results = runner.execute(plan(*rows, admissions=admissions))
    assert model.log == ["forward", [*PROMPT[:4]], [3, 11, 12]]
    assert results[1] == RowResult()
    assert not results[2].tokens
    model.log.clear()
    assert runner.execute(plan(row(0, PROMPT[3:5], start=3, samples=False))) == [RowResult()]
    assert model.log == ["forward"]


def test_runner_results_follow_row_order() -> None:
    admissions = [admission(GREEDY, (slot + 5,) * 4, slot=slot) for slot in range(5)]
    runner = build()
    rows = [row(slot, (slot + 5,) * 4, samples=slot != 3) for slot in (2, 0, 3, 4, 1)]
    results = runner.execute(plan(*rows, admissions=admissions))
    assert [result.tokens for result in results] == [
        (best(7),),
        (best(5),),
        (),
        (best(9),),
        (best(6),),
    ]


def test_runner_accepts_right_drafts_only() -> None:
    runner = build()
    first = best(PROMPT[-1])
    second, third = best(first), best(best(first))
    wrong = (second + 1) % VOCAB
    for drafts, expected in [
        ((first, second), (first, second, third)),
        ((first, wrong), (first, second)),
        ((wrong, second), (first,)),
    ]:
        admitted = [admission(GREEDY, PROMPT)]
        this = row(0, PROMPT[-1:] + drafts, start=len(PROMPT) - 1, num_drafts=2)
        assert runner.execute(plan(this, admissions=admitted)) == [RowResult(expected)]


def test_runner_accepts_sampled_drafts_like_single_steps() -> None:
    sampling = SamplingParams(temperature=1.2, seed=8)
    runner, tokens = build(), [*PROMPT]
    admitted = [admission(sampling, PROMPT)]
    for _ in range(4):
        this = row(0, tokens[-1:], start=len(tokens) - 1)
        (result,) = runner.execute(plan(this, admissions=admitted))
        tokens += result.tokens
        admitted = []
    output = tuple(tokens[len(PROMPT) :])
    at_once = row(0, PROMPT[-1:] + output[:3], start=len(PROMPT) - 1, num_drafts=3)
    admitted = [admission(sampling, PROMPT)]
    assert build().execute(plan(at_once, admissions=admitted)) == [RowResult(output)]


def test_runner_draw_depends_on_output_position() -> None:
    sampling = SamplingParams(temperature=1.5, seed=5)

    def drawn(num_prompt: int, choice: int = 0) -> tuple[int, ...]:
        tokens = (1, 1, 1, 1, 1, 1)
        output = tokens[num_prompt:]
        admitted = admission(sampling, tokens[:num_prompt], output, choice=choice)
        (result,) = build().execute(plan(row(0, tokens), admissions=[admitted]))
        return result.tokens

    assert len({drawn(num_prompt) for num_prompt in range(1, 7)}) > 2
    assert len({drawn(3, choice) for choice in range(6)}) > 2
    later = replace(admission(sampling, (9, 9, 1)), slot=0)
    (result,) = build().execute(plan(row(0, (9, 9, 1)), admissions=[later]))
    assert result.tokens == drawn(6)


# prompts


def scores_of(prompt: Sequence[int], num_top: int) -> list[Any]:
    return [own_logprobs(TABLE[before], token, num_top) for before, token in pairwise(prompt)]


def test_runner_scores_prompt_from_second_token() -> None:
    expected = scores_of(PROMPT, 2)
    for cuts in ([7], [1, 6], [3, 3, 1], [2, 4, 1], [1] * 7):
        runner, admitted = build(), [admission(SCORES, PROMPT)]
        got, start = [], 0
        for count in cuts:
            end = start + count
            this = row(0, PROMPT[start:end], start, samples=end == 7, scores_prompt=True)
            (result,) = runner.execute(plan(this, admissions=admitted))
            assert (result.tokens == (best(PROMPT[-1]),)) == (end == 7)
            got += result.prompt_logprobs
            start, admitted = end, []
        assert is_close(got, expected)


def test_runner_does_not_score_output_of_earlier_attempt() -> None:
    admitted = admission(SCORES, PROMPT[:4], PROMPT[4:])
    (result,) = build().execute(plan(row(0, PROMPT, scores_prompt=True), admissions=[admitted]))
    assert is_close(result.prompt_logprobs, scores_of(PROMPT[:4], 2))
    one = replace(admitted, num_prompt=1)
    (result,) = build().execute(plan(row(0, PROMPT, scores_prompt=True), admissions=[one]))
    assert result.prompt_logprobs == ()


def test_runner_scores_long_prompts_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_scores, "SCORED_AT_ONCE", 4)
    model = TableModel()
    admissions = [admission(replace(SCORES, prompt_logprobs=i), PROMPT, slot=i) for i in range(3)]
    rows = [row(i, PROMPT, scores_prompt=True) for i in range(3)]
    results = build(model).execute(plan(*rows, admissions=admissions))
    assert [len(asked) for asked in model.log[1:]] == [4, 4, 4, 4, 2, 3]
    for i, result in enumerate(results):
        assert is_close(result.prompt_logprobs, scores_of(PROMPT, i))


def test_runner_waits_for_prompt_scores_only_at_results(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda this: waited.append(this) or wait(this))
    this = row(0, PROMPT, scores_prompt=True)
    step = build()._launch(plan(this, admissions=[admission(SCORES, PROMPT)]))
    step.sample()
    assert not waited
    [result] = step.results()
    assert is_close(result.prompt_logprobs, scores_of(PROMPT, 2))
    assert len(waited) == 2


def test_runner_waits_for_step_without_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of a chunk that samples nothing are awaited as well.

    Otherwise the host launches all chunks of a long prompt before the device has computed one.
    New requests would wait for all of them, and the last chunk would look like a hung step.
    """
    waited = []
    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda this: waited.append(this) or wait(this))
    step = build()._launch(plan(row(0, PROMPT, samples=False)))
    step.sample()
    assert not waited
    assert step.results() == [RowResult()]
    assert len(waited) == 1


def test_runner_confines_nonfinite_prompt_logits_to_its_row() -> None:
    model = TableModel()
    model.table[23] = math.nan
    admissions = [admission(SCORES, PROMPT), admission(SCORES, (1, 2), slot=1)]
    chunk = row(0, PROMPT[:5], samples=False, scores_prompt=True)
    other = row(1, (1, 2), scores_prompt=True)
    broken, whole = build(model).execute(plan(chunk, other, admissions=admissions))
    assert isinstance(broken.error, EngineFailed)
    assert not broken.prompt_logprobs
    assert whole.tokens == (best(2),)


def test_runner_closes_graphs_before_group() -> None:
    ended: list[str] = []

    class Closed(Group):
        def close(self) -> None:
            ended.append("group")

    runner = build(group=Closed())
    graphs: Any = SimpleNamespace(close=lambda: ended.append("graphs"))
    runner._graphs = graphs
    runner.close()
    assert ended == ["graphs", "group"]


# adapters


def adapted(slot: int, adapter: str) -> Admission:
    return replace(admission(GREEDY, (1, 2), slot=slot), adapter=adapter)


def test_runner_numbers_the_adapters_of_tokens() -> None:
    model = TableModel()
    runner = build(model, adapters=("a", "b"))
    admissions = [adapted(0, "b"), adapted(1, ""), adapted(2, "a")]
    rows = row(0, (3,)), row(1, (4, 5)), row(2, (6, 7, 8))
    runner.execute(plan(*rows, admissions=admissions))
    assert model.adapters.pop().tolist() == [2, 0, 0, 1, 1, 1]
    runner.execute(plan(row(2, (9,), 3), row(0, (9,), 1)))
    assert model.adapters.pop().tolist() == [1, 2]
    runner.execute(plan(row(1, (9,), 2)))
    assert model.adapters.pop() is None
    # The engine does not release a slot that it reassigns in the same step.
    runner.execute(plan(row(0, (3,)), row(2, (6,)), admissions=[adapted(0, ""), adapted(2, "b")]))
    assert model.adapters.pop().tolist() == [0, 2]
    runner.release([2])
    assert not runner._adapter_of_slot


def test_runner_captures_no_step_with_adapters() -> None:
    model = TableModel()
    runner = build(model, adapters=("a",))
    replayed: list[Rows] = []

    def run(rows: Rows, parcel: object) -> Tensor:
        replayed.append(rows)
        return torch.from_numpy(rows.tokens).unsqueeze(1)

    graphs: Any = SimpleNamespace(bucket=lambda rows: 2, run=run)
    runner._graphs = graphs
    runner.execute(plan(row(0, (3,)), row(1, (4,)), admissions=[adapted(0, ""), adapted(1, "")]))
    assert len(replayed) == 1 and not model.seen
    runner.execute(plan(row(0, (3,)), row(1, (4,)), admissions=[adapted(1, "a")]))
    assert len(replayed) == 1 and model.adapters.pop().tolist() == [0, 1]


# ranks


def batch() -> Plan:
    """Return a plan with drafts, a row without sampling, a failing row, and prompt scores."""
    grammar = Grammar(GrammarKind.REGEX, ("never",))
    refusing = SamplingParams(grammar=grammar, min_tokens=1)
    stop = 9
    admissions = [
        admission(GREEDY, (1, 2), slot=0),
        admission(GREEDY, PROMPT, slot=1),
        admission(refusing, (3,), slot=2, stops=[stop], grammar=FakeGrammar(lambda _: [stop])),
        admission(SCORES, PROMPT, slot=3),
    ]
    rows = (
        row(0, (2, best(2), best(2)), start=1, num_drafts=2),
        row(1, PROMPT[:4], samples=False),
        row(2, (3,)),
        row(3, PROMPT[:3], samples=False, scores_prompt=True),
    )
    return plan(*rows, admissions=admissions)


WORD = [
    [best(2), best(best(2)), NO_TOKEN],
    [FAILED, NO_TOKEN, NO_TOKEN],
    [NO_TOKEN, NO_TOKEN, NO_TOKEN],
]


def test_rank_0_sends_drawn_tokens_and_failures() -> None:
    group = OneOfTwo(0)
    results = build(group=group).execute(batch())
    assert group.broadcasts == [WORD]
    assert results == build().execute(batch())[:2] + results[2:]
    assert (
        str(results[2].error)
        == "no token is left to sample: excluded by the grammar and min_tokens"
    )
    assert len(results[3].prompt_logprobs) == 3


def test_follower_rank_uses_results_of_rank_0() -> None:
    first, second = TableModel(), TableModel(rank=1)
    build(first).execute(batch())
    results = build(second, OneOfTwo(1, WORD)).execute(batch())
    assert second.log == first.log
    assert [result.tokens for result in results] == [tuple(WORD[0][:2]), (), (), ()]
    assert isinstance(results[2].error, EngineFailed)
    assert [result.error for result in results[:2] + results[3:]] == [None] * 3


class Refusing(FakeGrammar):
    """Grammar that rejects the output so far."""

    def matcher(self, stop_token_ids: frozenset[int], output: Sequence[int]) -> Any:
        raise InvalidRequest(f"{list(output)} is not of the grammar")


def plain_batch() -> Plan:
    """Return a plan without drafts: one row samples, one does not, and two fail.

    The failing rows have no permitted token, and a grammar that rejects the output.
    """
    grammar = Grammar(GrammarKind.REGEX, ("never",))
    sampling = SamplingParams(grammar=grammar, min_tokens=1)
    admissions = [
        admission(GREEDY, (1, 2), slot=0),
        admission(GREEDY, PROMPT, slot=1),
        admission(sampling, (3,), slot=2, stops=[9], grammar=FakeGrammar(lambda _: [9])),
        admission(sampling, (3,), slot=3, grammar=Refusing(lambda _: [])),
    ]
    rows = (row(0, (2,), 1), row(1, PROMPT[:4], samples=False), row(2, (3,)), row(3, (3,)))
    return plan(*rows, admissions=admissions)


def test_rank_0_sends_draftless_tokens_before_reading_them() -> None:
    group = OneOfTwo(0)
    step = build(group=group)._launch(plain_batch())
    assert group.broadcasts == []
    step.sample()
    [[token, *marks]] = group.broadcasts
    assert token == best(2) and [mark < 0 for mark in marks] == [True, True]
    results = step.results()
    assert len(group.broadcasts) == 1
    assert [result.tokens for result in results] == [(best(2),), (), (), ()]
    assert [str(result.error) for result in results[2:]] == [
        "no token is left to sample: excluded by the grammar and min_tokens",
        "[] is not of the grammar",
    ]


def test_follower_rank_continues_with_received_tokens() -> None:
    model, last_tokens = TableModel(rank=1), LastTokens(4, torch.device("cpu"))
    group = OneOfTwo(1, [best(2), -2, -1])
    runner = build(model, group, last_tokens=last_tokens)
    assert runner.launch is not None
    first = runner.launch(plain_batch())
    first.sample()
    runner.launch(plan(row(0, (UNKNOWN,), 2, samples=False)))
    results = first.results()
    assert [result.tokens for result in results] == [(best(2),), (), (), ()]
    assert [type(result.error) for result in results] == [type(None)] * 2 + [EngineFailed] * 2
    assert model.seen == [[2, *PROMPT[:4], 3, 3], [best(2)]]


def test_rank_0_sends_nothing_for_step_without_results() -> None:
    group = OneOfTwo(0)
    admitted = [admission(GREEDY, PROMPT)]
    build(group=group).execute(plan(row(0, PROMPT[:3], samples=False), admissions=admitted))
    assert group.broadcasts == []


def test_runner_fails_row_whose_output_violates_grammar() -> None:
    sampling = SamplingParams(grammar=Grammar(GrammarKind.REGEX, ("a",)))
    refused = admission(sampling, (1,), (7, 6), grammar=Refusing(lambda _: ()))
    (result,) = build().execute(plan(row(0, (1, 7, 6)), admissions=[refused]))
    assert str(result.error) == "[7, 6] is not of the grammar"
