"""CPU that dispatch by cached prefix adds to the leader, for each request.

Requests with 12,000 tokens, of which a system prompt of 4,096 is cached everywhere, pass through
the product's leader state while others wait: each is queued, placed on one of 8 workers, and
reported as computed, with its chunks stored and as many others evicted. The same with requests that
have no chunks is subtracted. Both are measured in turn, in CPU time of this thread, and the median
counts.
``index`` is the part of the index alone: lookup, insertion, confirmation and eviction.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from random import Random
from statistics import median
from typing import Any

from everlift.hashes import CHUNK_SIZE
from everlift.v1 import session_pb2
from router.admission.placement import Placement
from router.admission.policy import Rules
from router.admission.prefix_index import PrefixIndex
from router.admission.scheduler import LeaderState
from router.admission.throughput import Work
from router.admission.workers import Capacity, Load
from router.config import RouterConfig

QUEUED = (1_000, 100_000)
_PROMPT_TOKENS, _SYSTEM_TOKENS = 12_000, 4096
_WORKERS = 8
_GATEWAY = "gateway"
_ROUNDS, _CYCLES = 15, 40
_RNG = Random(1)
_SYSTEM = [_RNG.getrandbits(64) for _ in range(_SYSTEM_TOKENS // CHUNK_SIZE)]


def _prompt() -> list[int]:
    own = _PROMPT_TOKENS // CHUNK_SIZE - len(_SYSTEM)
    return [*_SYSTEM, *(_RNG.getrandbits(64) for _ in range(own))]


class _Leader:
    """Leader whose idle workers get one request each in a cycle."""

    def __init__(self, queued: int, *, has_chunks: bool) -> None:
        config = RouterConfig(max_queued=10**9, locality=has_chunks)
        self._placement = Placement(config)
        self._state = LeaderState(
            config, Rules.of(config), self._placement, lambda worker_id: (), "", 0.0
        )
        self._state.handover.set_live_gateways([_GATEWAY])
        self._state.connect(_GATEWAY, 0.0)
        self._send(session_pb2.GatewayMessage(is_complete=True), 0.0)
        self._has_chunks = has_chunks
        self._names, self._epochs, self._frames = count(), count(1), count()
        self._stored: dict[str, list[Sequence[int]]] = {}
        for number in range(_WORKERS):
            name = f"worker-{number}"
            self._placement.join(name, Capacity(256, 26_426))
            self._stored[name] = []
            self._report(name, 0.0)
            if has_chunks:
                self._placement.index.update(name, _SYSTEM, ())
        self._now = 0.0
        for _ in range(queued):
            self._send(session_pb2.GatewayMessage(enqueue=[self._request()]), 0.0)

    def _send(self, message: session_pb2.GatewayMessage, now: float) -> None:
        self._state.on_message(_GATEWAY, message, now)

    def _request(self) -> session_pb2.Waiting:
        return session_pb2.Waiting(
            request_id=f"r{next(self._names)}",
            arrived=self._now if self._names else 0.0,
            prompt_tokens=_PROMPT_TOKENS,
            max_tokens=256,
            choices=1,
            predicted_tokens=200,
            predicted_total=200 + _PROMPT_TOKENS,
            chunks=_prompt() if self._has_chunks else (),
        )

    def _report(self, name: str, now: float) -> None:
        self._placement.report(name, Load(sequence_number=next(self._frames), work=Work()), now)

    def cycle_s(self) -> tuple[float, int]:
        """Return the CPU seconds of a cycle, and how many requests it had."""
        self._now += 0.1
        now = self._now
        messages = [session_pb2.GatewayMessage(enqueue=[self._request()]) for _ in range(_WORKERS)]
        evicted = {
            name: stored.pop(0)[len(_SYSTEM) :] if len(stored) > 50 else ()
            for name, stored in self._stored.items()
        }
        began = time.thread_time()
        for message in messages:
            self._send(message, now)
        placed = self._state.place(now, now, 64, lambda: next(self._epochs))
        for each in placed:
            self._state.on_dispatched(each, _GATEWAY)
            self._placement.acknowledge(each.worker_id, each.epoch)
        index = self._placement.index
        for each in placed:
            if chunks := each.waiting.chunks:
                name = each.worker_id
                index.update(name, chunks[len(_SYSTEM) :], evicted[name])
                index.settle(name, each.epoch)
            self._report(each.worker_id, now)
        seconds = time.thread_time() - began
        for each in placed:
            self._send(session_pb2.GatewayMessage(withdraw=[each.waiting.request_id]), now)
            if each.waiting.chunks:
                self._stored[each.worker_id].append(each.waiting.chunks)
        return seconds, len(placed)

    def us(self) -> float:
        """Return the microseconds of CPU per request."""
        cycles = [self.cycle_s() for _ in range(_CYCLES)]
        return 1e6 * sum(it for it, _ in cycles) / sum(number for _, number in cycles)


def index_us(chunks_held: int) -> float:
    """Return the microseconds of the index alone, when each worker has so many chunks."""
    index = PrefixIndex()
    for number in range(_WORKERS):
        own = [_RNG.getrandbits(64) for _ in range(chunks_held)]
        index.join(f"worker-{number}", [*_SYSTEM, *own])
    seconds = []
    before: list[int] = []
    for epoch in range(1, 400):
        chain, name = _prompt(), f"worker-{epoch % _WORKERS}"
        began = time.thread_time()
        index.depths(chain)
        index.expect(name, epoch, chain)
        index.update(name, chain[len(_SYSTEM) :], before if epoch % _WORKERS == 1 else ())
        index.settle(name, epoch)
        seconds.append(time.thread_time() - began)
        if epoch % _WORKERS == 1:
            before = chain[len(_SYSTEM) :]
    return 1e6 * median(seconds)


def measure(queued: int) -> dict[str, float]:
    """Return the microseconds per request with and without chunks, and what they add."""
    leaders = {it: _Leader(queued, has_chunks=it) for it in (False, True)}
    rounds = []
    for number in range(_ROUNDS):
        order = (False, True) if number % 2 else (True, False)
        found = {it: leaders[it].us() for it in order}
        rounds.append((found[False], found[True]))
    return {
        "without_us": median(it for it, _ in rounds),
        "with_us": median(it for _, it in rounds),
        "added_us": median(after - before for before, after in rounds),
    }


def leader(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    found = {f"{queued}": measure(queued) for queued in QUEUED}
    ratios = {f"leader_us_added_{queued}": it["added_us"] for queued, it in found.items()}
    return {**found, "index_us": index_us(3300)}, ratios
