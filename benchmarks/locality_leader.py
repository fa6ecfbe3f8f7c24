"""CPU time that prefix-cache-aware dispatch adds to the leader, per request of 12,000 tokens.

``index`` is the cost of lookup, insertion and confirmation (stored chunks, end of the prefill) in
the index of a leader with many queued requests; each of its 8 workers has 3,300 other chunks. A
cold prompt shares only a system prompt of 4,096 tokens with others. Of a session's turn, 40 of the
46 chunks are known. Evictions are measured separately. Figures are medians of this thread's CPU
time.

``path`` is the whole cost. Each cold request is queued, placed on an idle worker, and reported as
computed; its chunks are stored and as many others evicted. The cost of requests without chunks is
subtracted. Both are measured in turn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from random import Random
from statistics import median
from typing import Any, NamedTuple

from everlift.hashes import CHUNK_SIZE
from everlift.v1 import session_pb2
from router.admission.leader_state import LeaderState
from router.admission.placements import Placements
from router.admission.policy import Rules
from router.admission.throughput import Work
from router.admission.workers import Capacity, Load
from router.config import RouterConfig

QUEUED = (1_000, 100_000)
_PROMPT_TOKENS, _SYSTEM_TOKENS = 12_000, 4096
_WORKERS = 8
_GATEWAY = "gateway"
_ROUNDS, _CYCLES = 15, 40
_REQUESTS = 500
#: Chunks of a turn's prompt that its worker has, and those that each worker has of others.
_TURN_KNOWN, _CHUNKS_HELD = 40, 3300
_RNG = Random(1)
_SYSTEM = [_RNG.getrandbits(64) for _ in range(_SYSTEM_TOKENS // CHUNK_SIZE)]


def _prompt() -> list[int]:
    own = _PROMPT_TOKENS // CHUNK_SIZE - len(_SYSTEM)
    return [*_SYSTEM, *(_RNG.getrandbits(64) for _ in range(own))]


class _Leader:
    """Leader whose idle workers get one request each in a cycle."""

    def __init__(self, queued: int, *, has_chunks: bool) -> None:
        config = RouterConfig(max_queued=10**9, locality=has_chunks)
        placements = Placements(config)
        self._placement = placements[""]
        self._state = LeaderState(
            config, Rules.of(config), placements, lambda worker_id: (), "", 0.0
        )
        self._state.handover.set_live_gateways([_GATEWAY])
        self._state.connect(_GATEWAY, 0.0)
        self._send(session_pb2.GatewayMessage(is_complete=True), 0.0)
        self.index = self._placement.index
        self._has_chunks = has_chunks
        self._names, self._epochs, self._frames = count(), count(1), count()
        self._stored: dict[str, list[Sequence[int]]] = {}
        self._now = 0.0
        for number in range(_WORKERS):
            name = f"worker-{number}"
            self._placement.join(name, Capacity(256, 26_426))
            self._stored[name] = []
            self._report(name, 0.0)
            if has_chunks:
                others = [_RNG.getrandbits(64) for _ in range(_CHUNKS_HELD)]
                self.index.update(name, [*_SYSTEM, *others], ())
        for _ in range(queued):
            self._send(session_pb2.GatewayMessage(enqueue=[self._request()]), 0.0)

    def _send(self, message: session_pb2.GatewayMessage, now: float) -> None:
        self._state.on_message(_GATEWAY, message, now)

    def _request(self) -> session_pb2.Waiting:
        return session_pb2.Waiting(
            request_id=f"r{next(self._names)}",
            arrived=self._now,
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
        for each in placed:
            if chunks := each.waiting.chunks:
                name = each.worker_id
                self.index.update(name, chunks[len(_SYSTEM) :], evicted[name])
                self.index.settle(name, each.epoch)
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


class _IndexCost(NamedTuple):
    cold_us: Any
    turn_us: Any
    evict_us: Any


def index_cost(leader: _Leader) -> _IndexCost:
    """Return the microseconds of the leader's index per request."""
    index = leader.index
    costs = _IndexCost([], [], [])
    for epoch in range(1_000_000, 1_000_000 + _REQUESTS):
        name = f"worker-{epoch % _WORKERS}"
        for is_turn in (False, True):
            chain = _prompt()
            num_known = _TURN_KNOWN if is_turn else len(_SYSTEM)
            index.update(name, chain[:num_known], ())
            new = chain[num_known:]
            began = time.thread_time_ns()
            index.depths(chain)
            index.expect(name, epoch, chain)
            index.update(name, new, ())
            index.settle(name, epoch)
            (costs.turn_us if is_turn else costs.cold_us).append(time.thread_time_ns() - began)
            began = time.thread_time_ns()
            index.update(name, (), chain[len(_SYSTEM) :])
            if not is_turn:
                costs.evict_us.append(time.thread_time_ns() - began)
    return _IndexCost(*(median(ns) / 1000 for ns in costs))


def path_cost(without: _Leader, leader: _Leader) -> dict[str, float]:
    """Return the microseconds per request of both leaders, and their difference."""
    rounds = []
    for number in range(_ROUNDS):
        if number % 2:
            after, before = leader.us(), without.us()
        else:
            before, after = without.us(), leader.us()
        rounds.append((before, after))
    return {
        "without_us": median(it for it, _ in rounds),
        "with_us": median(it for _, it in rounds),
        "added_us": median(after - before for before, after in rounds),
    }


def measure(queued: int) -> dict[str, Any]:
    leader = _Leader(queued, has_chunks=True)
    return {
        "index": index_cost(leader)._asdict(),
        "path": path_cost(_Leader(queued, has_chunks=False), leader),
    }


def leader(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    found = {f"{queued}": measure(queued) for queued in QUEUED}
    ratios: dict[str, float] = {}
    for queued, cost in found.items():
        ratios[f"leader_us_added_{queued}"] = cost["index"]["cold_us"]
        ratios[f"leader_us_added_turn_{queued}"] = cost["index"]["turn_us"]
        ratios[f"leader_us_path_{queued}"] = cost["path"]["added_us"]
    return found, ratios
