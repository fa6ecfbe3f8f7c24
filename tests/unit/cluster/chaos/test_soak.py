"""Figures of a soak, for small histories."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest

from cluster.chaos.run import Injection
from everlift.client.received_output import Chunk
from router.ledger.entry import Event
from tests.soak.clients import Seen
from tests.soak.growth import LIMIT_KIB, Growth, Sample, resident_kib
from tests.soak.pool import Answer, make_pool
from tests.soak.times import Line, detections, next_tokens, of_workers_alone, p, struck, written

RIGHT = Answer((((1, 2), "ab", "STOP"),))
KILL = Injection("kill worker", 10.0, "w")


def seen(*chunks: tuple[int, int]) -> Seen:
    """Return the record of chunks, each given as offset and number of tokens."""
    seen = Seen("r", RIGHT)
    for offset, count in chunks:
        seen.add(Chunk(offset, tuple(range(count)), "", epoch=1, unledgered=False))
    return seen


@pytest.mark.parametrize(
    ("chunks", "repeated", "missing", "received"),
    [
        ([(0, 1), (1, 2)], 0, 0, [[0, 0, 1]]),
        ([(0, 2), (1, 2)], 1, 0, [[0, 0, 1]]),
        ([(0, 1), (3, 1)], 0, 2, [[0, 0]]),
        ([], 0, 0, []),
    ],
)
def test_soak_counts_repeated_and_missing_tokens(
    chunks: list[tuple[int, int]], repeated: int, missing: int, received: list[list[int]]
) -> None:
    noted = seen(*chunks)
    assert (noted.repeated, noted.missing, noted.received) == (repeated, missing, received)


def test_soak_missing_answer_is_lost_and_other_answer_is_wrong() -> None:
    noted = seen((0, 2))
    assert (noted.is_lost, noted.is_wrong) == (True, False)
    noted.answer = RIGHT
    assert (noted.is_lost, noted.is_wrong) == (False, False)
    noted.answer = Answer((((1, 3), "ab", "STOP"),))
    assert (noted.is_lost, noted.is_wrong) == (False, True)


def lines(*events: tuple[float, str, str, str]) -> list[Line]:
    return [Line(*event) for event in events]


def test_detections_use_the_first_report_of_each_router() -> None:
    words = lines(
        (9.0, "router-0", "worker lost", "w"),
        (10.1, "router-0", "worker lost", "other"),
        (10.2, "router-0", "worker lost", "w"),
        (10.5, "router-1", "worker lost", "w"),
        (10.6, "router-0", "worker lost", "w"),
        (99.0, "router-2", "worker lost", "w"),
    )
    found = detections([KILL], words)
    assert found == {"kill worker": pytest.approx([0.2, 0.5])}


def test_detections_exclude_a_stalled_router() -> None:
    words = lines(
        (10.4, "router-1", "event loop stalled", ""),
        (10.8, "router-0", "worker lost", "w"),
        (11.3, "router-1", "worker lost", "w"),
        (11.4, "router-0", "event loop stalled", ""),
    )
    assert detections([KILL], words) == {"kill worker": pytest.approx([0.8])}


def test_detections_use_the_first_new_leader() -> None:
    words = lines(
        (11.5, "router-1", "leadership acquired", ""), (14.0, "router-0", "leadership acquired", "")
    )
    assert detections([Injection("pause leader", 10.0, "l")], words) == {"pause leader": [1.5]}


def test_worker_faults_near_other_faults_are_excluded() -> None:
    def at(moment: float, name: str = "kill worker") -> Injection:
        return Injection(name, moment, "w")

    log = [
        at(10.0),
        at(15.0, "kill ledger"),
        at(18.0),
        at(30.0, "slow worker"),
        at(31.0),
        at(40.0),
        at(41.9, "pause leader"),
    ]
    assert of_workers_alone(log) == [at(10.0), at(31.0)]


def gaps(arrivals: Sequence[tuple[float, int]], *events: Event) -> list[float]:
    stream = Seen("r", RIGHT, arrivals=[*arrivals])
    return next_tokens([KILL], [stream], {"r": events})


def test_gaps_end_at_the_first_token_of_the_next_attempt() -> None:
    on_w = (Event(9.0, "dispatch", "w"), Event(11.0, "release", "lost"))
    assert gaps([(9.5, 1), (10.01, 1), (12.0, 2)], *on_w) == [2.0]
    assert gaps([(12.0, 2)], *on_w) == [2.0]
    assert gaps([(9.5, 1), (10.01, 1)], *on_w) == []


def test_gaps_exclude_streams_on_other_workers() -> None:
    arrivals = [(9.5, 1), (12.0, 2)]
    assert gaps(arrivals, Event(9.0, "dispatch", "v")) == []
    assert gaps(arrivals, Event(9.0, "dispatch", "w"), Event(9.9, "release", "lost")) == []
    assert gaps(arrivals, Event(10.1, "dispatch", "w")) == []


def test_struck_worker_fault_begins_at_the_workers_log_line() -> None:
    words = lines(
        (9.9, "worker-0.rank-0", "fault", "w"),
        (10.3, "worker-1.rank-0", "fault", "v"),
        (10.4, "worker-0.rank-0", "fault", "w"),
        (10.5, "router-0", "worker lost", "w"),
    )
    [injection] = struck([KILL], words)
    assert injection == Injection("kill worker", 10.4, "w")


def test_struck_excludes_refused_and_late_faults() -> None:
    too_late = lines((16.0, "worker-0.rank-0", "fault", "w"))
    refused, of_router = (
        Injection("kill worker", 10.0, "", "refused"),
        Injection("pause leader", 10.0, "l"),
    )
    assert struck([KILL, refused, of_router], too_late) == [of_router]


def test_soak_logs_are_merged_by_time(tmp_path: Path) -> None:
    for name, second in (("router-1", 2), ("router-0", 1)):
        line = {
            "ts": datetime.fromtimestamp(second, UTC).isoformat(timespec="milliseconds"),
            "component": name,
            "event": "worker lost",
            "worker_id": "w",
        }
        (tmp_path / f"{name}.log").write_text(f"warning: no JSON\n{json.dumps(line)}\n")
    assert written(tmp_path) == lines(
        (1.0, "router-0", "worker lost", "w"), (2.0, "router-1", "worker lost", "w")
    )


def test_soak_percentile_of_few_is_an_observed_value() -> None:
    assert (p(99, []), p(99, [2.5]), p(50, [1.0, 2.0, 4.0])) == (0.0, 2.5, 2.0)


def test_soak_pool_is_reproducible_by_seed() -> None:
    assert make_pool(20, 1) == make_pool(20, 1) != make_pool(20, 2)


def growth(kib_per_request: float, num_requests: int) -> Growth:
    """Return the growth of a process: 100 MiB in warm-up, and ``kib_per_request`` per request.

    Samples have 4 MiB of noise.
    """
    rng, warm_up = Random(1), num_requests // 4
    return Growth.of(
        [
            Sample(
                done, round(100 * 1024 * min(1, done / warm_up) + kib_per_request * done + noise)
            )
            for done in range(0, num_requests + 1, 20)
            for noise in [rng.uniform(-2048, 2048)]
        ]
    )


@pytest.mark.parametrize("kib_per_request", [0.0, 0.1, 0.3, 5.0])
def test_soak_growth_of_many_requests_is_measured(kib_per_request: float) -> None:
    measured = growth(kib_per_request, 60_000)
    assert measured.kib_per_request == pytest.approx(kib_per_request, abs=0.08)
    assert measured.bound_kib == LIMIT_KIB
    assert measured.warm_up_mib == pytest.approx(102 + kib_per_request * 30_000 / 1024, abs=35)


def test_soak_growth_bound_of_few_requests_is_wider() -> None:
    measured = growth(0.0, 4_000)
    assert measured.requests == pytest.approx(1_600, abs=40)
    assert measured.bound_kib == pytest.approx(4096 / measured.requests)
    assert measured.kib_per_request <= measured.bound_kib
    assert growth(5.0, 4_000).kib_per_request > measured.bound_kib


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_of_this_process_is_plausible() -> None:
    assert 1 << 13 < resident_kib(os.getpid()) < 1 << 26
