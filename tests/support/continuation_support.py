"""Requests that cover all state of a continuation, and ways to interrupt them."""

from __future__ import annotations

import re
from collections.abc import Callable

from router.config import RouterConfig
from router.ledger.entry import State
from tests.simulated_cluster.asked import ROUTERS, WORKERS, Asked, undisturbed
from tests.simulated_cluster.client import Manners, Transcript
from tests.simulated_cluster.cluster import SimCluster
from tests.simulated_cluster.worker import Build, build_fake
from worker.config import WorkerConfig

_PROMPT = range(1, 10)
PLAIN = Asked.of(_PROMPT, temperature=0, max_tokens=24)


def _stop_string() -> str:
    """Return several characters of the plain text, each of which is a token."""
    text = undisturbed(PLAIN).choices[0].text
    found = re.search(r"[!-~]{2,}", text[6:])
    assert found is not None
    return found.group()


def kinds() -> dict[str, Asked]:
    """Return requests by the property that a wrong continuation would lose."""
    sampled = {"temperature": 1, "seed": 11, "max_tokens": 24}
    return {
        "max_tokens": PLAIN,
        "a prompt in chunks": Asked.of(range(1, 101), temperature=0, max_tokens=10),
        "an omitted prefix": Asked.of(
            [1 + i % 90 for i in range(290)], **{**sampled, "max_tokens": 7}, n=2
        ),
        "seed": Asked.of(_PROMPT, **sampled),
        "filters": Asked.of(_PROMPT, **sampled, top_p=0.9, top_k=40, min_p=0.01),
        "presence": Asked.of(_PROMPT, temperature=0, max_tokens=24, presence_penalty=0.7),
        "frequency": Asked.of(_PROMPT, temperature=0, max_tokens=24, frequency_penalty=0.3),
        "repetition": Asked.of(_PROMPT, **sampled, repetition_penalty=1.3),
        "bias": Asked.of(_PROMPT, temperature=0, max_tokens=16, logit_bias={5: 2.0}),
        "allowed tokens and bad words": Asked.of(
            _PROMPT, **sampled, allowed_token_ids=(40, 41, 42), bad_words=("()", "*)", "(((")
        ),
        "eos": Asked.of(range(10, 27), temperature=0, max_tokens=200, stop_token_ids=(0,)),
        "min_tokens": Asked.of(
            range(3, 20), temperature=0, max_tokens=40, stop_token_ids=(0,), min_tokens=38
        ),
        "stop string": Asked.of(_PROMPT, temperature=0, max_tokens=24, stop=_stop_string()),
        "include_stop": Asked.of(
            _PROMPT, temperature=0, max_tokens=24, stop=_stop_string(), include_stop=True
        ),
        "logprobs": Asked.of(_PROMPT, **sampled, logprobs=3),
        "prompt_logprobs": Asked.of(
            range(1, 101), temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=2
        ),
        "n": Asked.of(_PROMPT, **{**sampled, "max_tokens": 9}, n=3, logprobs=1),
        "grammar and characters of several bytes": Asked.of(
            _PROMPT, temperature=1, seed=2, choice=("日本語の文章です", "größer als"), max_tokens=40
        ),
        "cache_salt": Asked.of(_PROMPT, temperature=0, max_tokens=16, cache_salt="mine"),
    }


class Bench(SimCluster):
    """Two gateways and two workers, on which requests are interrupted one after the other."""

    def __init__(
        self,
        routers: RouterConfig = ROUTERS,
        workers: WorkerConfig = WORKERS,
        build: Build = build_fake,
    ) -> None:
        super().__init__(routers, workers, build=build)
        for index in (0, 1):
            self.start_router(index)
        for index in (0, 1):
            self.start_worker(index)
        self.run_for(1.0)
        self._count = 0

    def broken(self, asked: Asked, index: int, break_it: Break) -> Transcript:
        """Return the transcript of a request that was interrupted when it had ``index`` tokens."""
        request_id = f"r{self._count}"
        self._count += 1
        manners = Manners(leaves_after=index, away=0.02) if break_it is attach else Manners()
        transcript = self.submit(request_id, asked.prompt, asked.arguments(), manners, router=1)
        self.run_until(lambda: self._has(transcript, index))
        break_it(self, request_id)
        self.settle(60)
        self._mend()
        return transcript

    def _has(self, transcript: Transcript, index: int) -> bool:
        entry = self.ledger.peek(transcript.request_id)
        is_there = entry is not None and entry.state is not State.QUEUED
        return is_there and transcript.num_tokens >= index

    def home(self, request_id: str) -> int | None:
        """Return the index of the request's worker, or None if it has ended."""
        entry = self.ledger.peek(request_id)
        assert entry is not None
        found = (i for i, it in self.workers.items() if it.worker_id == entry.worker)
        return next(found, None)

    def _mend(self) -> None:
        """Restart killed parts, and wait until the routers are connected to all workers."""
        for index in {0, 1} - self.workers.keys():
            self.start_worker(index)
        for index in {0, 1} - self.routers.keys():
            self.start_router(index)
        self.run_until(self._is_whole)

    def _is_whole(self) -> bool:
        routers = self.ready_routers()
        links = [link for _, router in routers for link in router._sessions.links]
        living = {worker.worker_id for worker in self.workers.values()}
        up = [link.info.worker_id for link in links if link.is_up]
        return len(routers) == 2 and sorted(up) == sorted([*living, *living])


Break = Callable[[Bench, str], None]


def kill(bench: Bench, request_id: str) -> None:
    if (home := bench.home(request_id)) is not None:
        bench.kill_worker(home)


def drain(bench: Bench, request_id: str) -> None:
    if (home := bench.home(request_id)) is not None:
        bench.drain_worker(home)
        bench.run_until(lambda: bench.home(request_id) != home)
        bench.kill_worker(home)


def preempt(bench: Bench, request_id: str) -> None:
    """Preempt the request; it resumes at the same worker."""
    if (home := bench.home(request_id)) is not None:
        bench.workers[home].preempt(request_id)


def move(bench: Bench, request_id: str) -> None:
    """Preempt the request and migrate it to another worker."""
    preempt(bench, request_id)
    gateway = bench.routers[1]
    assert gateway.router is not None
    requests = gateway.router._requests
    live = requests._registry.get(request_id)
    if live is not None:
        gateway.process.call_soon(requests.move, live.epoch)


def kill_gateway(bench: Bench, request_id: str) -> None:
    """Kill the request's router; its client reattaches by itself."""
    bench.kill_router(1)


def attach(bench: Bench, request_id: str) -> None:
    """Do nothing, because the client disconnects and reattaches by itself (see ``broken``)."""


BREAKS: tuple[Break, ...] = (kill, drain, preempt, move, kill_gateway, attach)
