"""Requests that are interrupted after each token and resumed elsewhere.

Their tokens, text, log probabilities, finish reasons and usage are those of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from everlift.v1 import session_pb2
from router.requests import messages
from tests.simulated_cluster.asked import Asked, undisturbed
from tests.simulated_cluster.judgement import listening
from tests.support.continuation_support import BREAKS, Bench, Break, kill, kinds
from tests.support.example_counts import examples
from worker.engine.chunk import Prefix
from worker.serving.chunk_store import ChunkStore

KINDS = kinds()
Loss = Callable[[session_pb2.Start], None]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with listening() as complaints, Bench() as it:
        yield it
        assert not complaints
        assert not it.clock.uncaught


def is_quick(kind: str, break_it: Break) -> bool:
    """Return whether `make test` tries a case: all kills, and a third of the other breaks."""
    return break_it is kill or ([*KINDS].index(kind) + BREAKS.index(break_it)) % 3 == 0


@pytest.mark.parametrize(
    ("kind", "break_it"),
    [
        pytest.param(
            kind,
            break_it,
            id=f"{kind}-{break_it.__name__}",
            marks=() if is_quick(kind, break_it) else (pytest.mark.long,),
        )
        for kind, break_it in product(KINDS, BREAKS)
    ],
)
def test_continuation_is_exact_at_every_index(bench: Bench, kind: str, break_it: Break) -> None:
    asked = KINDS[kind]
    # `make test` tries every eighth index for a killed worker, and every twentieth for others.
    step = 8 if break_it is kill else 20
    if examples(100) >= 100 or not is_quick(kind, break_it):
        step = 1
    for index in range(0, undisturbed(asked).num_tokens + 1, step):
        check(bench, asked, index, break_it)


def check(bench: Bench, asked: Asked, index: int, break_it: Break) -> None:
    transcript = bench.broken(asked, index, break_it)
    assert transcript.error is None
    assert transcript.result() == undisturbed(asked).result(), f"broken after {index} tokens"


def on_start(monkeypatch: pytest.MonkeyPatch, see: Loss) -> None:
    """Call ``see``, which may change it, for each message that starts a sequence at a worker."""
    start_of = messages.start

    def start(*arguments: Any, **options: Any) -> session_pb2.Start:
        message = start_of(*arguments, **options)
        see(message)
        return message

    monkeypatch.setattr(messages, "start", start)


def test_continuation_keeps_cache_salt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    salts: list[bytes] = []
    on_start(monkeypatch, lambda start: salts.append(start.salt))
    found = []
    for kind in ("cache_salt", "max_tokens"):
        salts.clear()
        check(bench, KINDS[kind], 5, kill)
        # On a busy machine a worker may be lost once more.
        assert len(salts) >= 2 and len(set(salts)) == 1
        found.append(salts[0])
    assert found[0] != found[1]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda it: it.__name__)
def test_missing_prefix_leaves_the_output_exact(
    bench: Bench, break_it: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers never have the prefixes that routers omit, and request the whole prompt each time."""
    asked: list[bytes] = []
    monkeypatch.setattr(ChunkStore, "find", lambda store, end, *_: asked.append(end))
    for index in (0, 1, 7):
        check(bench, KINDS["an omitted prefix"], index, break_it)
    assert asked


def test_wrong_prefix_is_detected(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    find = ChunkStore.find

    def wrong(store: ChunkStore, end: bytes, num_chunks: int, salt: bytes) -> Prefix | None:
        prefix = find(store, end, num_chunks, salt)
        return prefix and Prefix([7, *prefix.tokens[1:]], [])

    asked = KINDS["an omitted prefix"]
    # Only a worker that has the prefix receives a start without it.
    bench.broken(asked, 1, kill)
    monkeypatch.setattr(ChunkStore, "find", wrong)
    assert bench.broken(asked, 1, kill).result() != undisturbed(asked).result()


# Mutations of start messages: each omits state of a continuation, which the comparison must detect.


def all_prompt(start: session_pb2.Start) -> None:
    start.max_tokens -= len(start.output_ids)
    start.prompt_ids.extend(start.output_ids)
    del start.output_ids[:]


def more_tokens(start: session_pb2.Start) -> None:
    start.max_tokens += len(start.output_ids)


def other_seed(start: session_pb2.Start) -> None:
    start.sampling.seed += 1


def no_penalties(start: session_pb2.Start) -> None:
    start.sampling.presence_penalty = start.sampling.frequency_penalty = 0.0
    start.sampling.repetition_penalty = 1.0


def no_filters(start: session_pb2.Start) -> None:
    start.sampling.top_k, start.sampling.top_p, start.sampling.min_p = 0, 1.0, 0.0


def no_bias(start: session_pb2.Start) -> None:
    start.sampling.logit_bias.clear()


def no_end(start: session_pb2.Start) -> None:
    del start.stop_token_ids[:]


def no_minimum(start: session_pb2.Start) -> None:
    start.sampling.min_tokens = 0


def no_grammar(start: session_pb2.Start) -> None:
    start.sampling.ClearField("grammar")


LOSSES: dict[Loss, str] = {
    all_prompt: "presence",
    more_tokens: "max_tokens",
    other_seed: "seed",
    no_penalties: "repetition",
    no_filters: "filters",
    no_bias: "bias",
    no_end: "eos",
    no_minimum: "min_tokens",
    no_grammar: "grammar and characters of several bytes",
}


@pytest.mark.parametrize("lose", LOSSES, ids=lambda it: it.__name__)
def test_continuation_check_detects_omitted_state(
    bench: Bench, lose: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_start(monkeypatch, lambda start: lose(start) if start.output_ids else None)
    asked = KINDS[LOSSES[lose]]
    results = [bench.broken(asked, index, kill).result() for index in (1, 3, 7)]
    assert any(result != undisturbed(asked).result() for result in results)
