"""Continuations with the real engine in the simulated cluster.

The demo model in fp32 on torch, its tokenizer and compiled grammars are real. Routers, ledger,
network and time are those of the simulated cluster.

Log probabilities agree within 1e-4, because a continuation computes in one piece what was computed
token by token. Tokens are equal, because this model has no logits so close that rounding matters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import pytest

from everlift.errors import EverliftError
from everlift.sampling import Grammar, TokenLogprobs
from tests.simulated_cluster.asked import ROUTERS, Asked
from tests.simulated_cluster.client import Transcript
from tests.simulated_cluster.judgement import listening
from tests.support.continuation_support import BREAKS, Bench, Break, attach, kill, kill_gateway
from tests.support.example_counts import long
from tests.support.worker.grammar_support import CHOICE, DEMO_MODEL, Service, grammar_service
from worker.config import WorkerConfig
from worker.engine.plan import Plan, RowResult
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.runner import TorchRunner
from worker.serving.sessions import Compiled, Grammars

_STEP_S = 0.01
_TOLERANCE = 1e-4
_NAME = "count from 17 to 40:"

WORKERS = WorkerConfig(
    model=str(DEMO_MODEL),
    device="cpu",
    dtype="float32",
    num_threads=1,
    num_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=48,
)
HOT = {"temperature": 1.5, "seed": 4, "max_tokens": 24}
KINDS = {
    "greedy to its end": Asked.of(_NAME, temperature=0),
    "seed": Asked.of(_NAME, **HOT),
    "filters": Asked.of(_NAME, **HOT, top_k=20, top_p=0.9),
    "penalties": Asked.of(
        _NAME, **HOT, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.2
    ),
    "min_tokens": Asked.of("12 + 30 =", temperature=0, min_tokens=12, max_tokens=16),
    "stop string": Asked.of(_NAME, temperature=0, stop=" 27 2"),
    "include_stop": Asked.of(_NAME, temperature=0, stop=" 27 2", include_stop=True),
    "logprobs": Asked.of(_NAME, **HOT, logprobs=3, prompt_logprobs=2),
    "n": Asked.of(_NAME, **{**HOT, "max_tokens": 8}, n=3),
    "regex": Asked.of(_NAME, **HOT, regex=r"[0-9]{2}(, [0-9]{2}){5}"),
    "schema": Asked.of(
        "json name=ann age=31 city=rome:",
        temperature=0,
        max_tokens=60,
        json_schema='{"type": "object", "properties": {"age": {"type": "integer"}}}',
    ),
    "characters of several bytes": Asked.of("repeat 🚀 5 times:", temperature=0),
    "cache_salt": Asked.of(_NAME, temperature=0, max_tokens=12, cache_salt="mine"),
}
#: Kinds that `make test` tries here. It tries all kinds with a fake engine.
QUICK = ("seed", "penalties", "stop string", "n", "schema")


class Timed:
    """Runner whose steps take virtual time."""

    def __init__(self, runner: TorchRunner, spend: Callable[[float], None]) -> None:
        self._spend = spend
        self._runner = runner
        self.num_blocks, self.num_host_blocks = runner.num_blocks, runner.num_host_blocks
        self.host_load_s = runner.host_load_s
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.device_kind, self.adapters = runner.device_kind, runner.adapters
        self.adapter_slots = runner.adapter_slots
        self.unready_slots, self.release, self.close = (
            runner.unready_slots,
            runner.release,
            runner.close,
        )

    def execute(self, plan: Plan) -> list[RowResult]:
        self._spend(_STEP_S)
        return self._runner.execute(plan)


class AtOnce:
    """Grammar compiler that takes no virtual time."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def compile(self, grammar: Grammar, done: Callable[[Compiled | EverliftError], None]) -> None:
        done(self._service.order(grammar.kind, *grammar.texts).result(60))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with grammar_service() as service:
        service.compile(CHOICE, "the process starts here, and ends with the module")
        yield service


@pytest.fixture(scope="module")
def runners() -> dict[str, TorchRunner]:
    """Runners by host; a restarted worker reuses one with the old contents of its blocks."""
    return {}


@pytest.fixture
def bench(service: Service, runners: dict[str, TorchRunner]) -> Iterator[Bench]:
    def build(config: WorkerConfig, spend: Callable[[float], None]) -> tuple[Timed, Grammars]:
        if config.host not in runners:
            runners[config.host] = build_runner(WORKERS, Group.single())
        return Timed(runners[config.host], spend), AtOnce(service)

    routers = replace(ROUTERS, model=str(DEMO_MODEL))
    with listening() as complaints, Bench(routers, WORKERS, build) as it:
        yield it
        assert not complaints
        assert not it.clock.uncaught
    for runner in runners.values():
        # Killed workers leave their grammars, each of which has a process.
        runner.release(range(WORKERS.max_num_seqs))
    gc.collect()


UNDISTURBED: dict[str, Transcript] = {}


def undisturbed(bench: Bench, kind: str) -> Transcript:
    if kind not in UNDISTURBED:
        asked = KINDS[kind]
        UNDISTURBED[kind] = bench.submit(
            f"calm-{len(UNDISTURBED)}", asked.prompt, asked.arguments()
        )
        bench.settle(600)
    return UNDISTURBED[kind]


def spread(count: int, parts: int) -> list[int]:
    """Return evenly spaced indices from the first token to the last but one."""
    return sorted({1, *(1 + part * (count - 2) // parts for part in range(parts + 1))})


@pytest.mark.parametrize("break_it", [kill, long(kill_gateway), long(attach)])
@pytest.mark.parametrize("kind", [kind if kind in QUICK else long(kind) for kind in KINDS])
def test_real_engine_continuation_is_exact_at_some_indices(
    bench: Bench, kind: str, break_it: Break
) -> None:
    for index in spread(undisturbed(bench, kind).num_tokens, parts=1):
        check(bench, kind, index, break_it)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda it: it.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_real_engine_continuation_is_exact_at_every_index(
    bench: Bench, kind: str, break_it: Break
) -> None:
    for index in range(undisturbed(bench, kind).num_tokens + 1):
        check(bench, kind, index, break_it)


def check(bench: Bench, kind: str, index: int, break_it: Break) -> None:
    calm = undisturbed(bench, kind)
    got = bench.broken(KINDS[kind], index, break_it)
    assert got.error is None
    assert said(got) == said(calm), f"broken after {index} tokens"
    for mine, theirs in zip(scores(got), scores(calm), strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=_TOLERANCE)
        assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=_TOLERANCE)


def said(transcript: Transcript) -> object:
    """Return the output without log probabilities, in a form for comparison."""
    choices = [
        (tuple(it.tokens), it.text, it.finish_reason, len(it.logprobs))
        for _, it in sorted(transcript.choices.items())
    ]
    return choices, transcript.usage


def scores(transcript: Transcript) -> list[TokenLogprobs]:
    choices = [it.logprobs for _, it in sorted(transcript.choices.items())]
    return [*transcript.prompt_logprobs, *chain.from_iterable(choices)]
