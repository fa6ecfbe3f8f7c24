"""Gate of an upgrade: when a new Ray cluster replaces the old one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.router.restored_logging import restored_logging

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Ray


def test_gate_opens_with_as_many_workers_as_the_other_cluster() -> None:
    from cluster.ray.upgrade_gate import Progress

    progress = Progress()
    assert not progress.is_enough({"w": 0}, {"w": 3}, is_complete=False, now=0.0)
    # The configured minimum of one worker runs; the autoscaler has not requested more yet.
    assert not progress.is_enough({"w": 1}, {"w": 4}, is_complete=True, now=1.0)
    assert not progress.is_enough({"w": 2}, {"w": 5}, is_complete=False, now=9.0)
    assert progress.is_enough({"w": 3}, {"w": 6}, is_complete=True, now=10.0)


def test_gate_opens_at_once_without_another_cluster() -> None:
    from cluster.ray.upgrade_gate import Progress

    assert Progress().is_enough({"w": 0}, {"w": 0}, is_complete=True, now=0.0)
    assert Progress().is_enough({"w": 2}, {"w": 2}, is_complete=True, now=0.0)


def test_gate_opens_when_a_smaller_cluster_stays_complete() -> None:
    from cluster.ray.upgrade_gate import Progress

    progress = Progress()
    assert not progress.is_enough({"w": 2}, {"w": 7}, is_complete=True, now=0.0)
    assert not progress.is_enough({"w": 2}, {"w": 7}, is_complete=True, now=9.9)
    assert not progress.is_enough({"w": 2}, {"w": 7}, is_complete=False, now=9.95)
    assert not progress.is_enough({"w": 2}, {"w": 7}, is_complete=True, now=11.0)
    assert progress.is_enough({"w": 2}, {"w": 7}, is_complete=True, now=21.0)


def test_gate_waits_for_as_many_workers_of_each_model() -> None:
    from cluster.ray.upgrade_gate import Progress

    progress = Progress()
    total = {"worker": 5, "worker-small": 5}
    # The total is equal, but one model has fewer workers.
    own = {"worker": 1, "worker-small": 4}
    assert not progress.is_enough(own, total, is_complete=True, now=0.0)
    assert progress.is_enough({**own, "worker": 3}, total, is_complete=True, now=1.0)


class FakeRay:
    """Ray cluster with its internal key-value store and a Serve application of two workers."""

    def __init__(self, total: int = 2) -> None:
        self.total = total
        self.stored: dict[tuple[str, str], bytes] = {}
        self.num_activations = 0
        self.router = SimpleNamespace(
            num_workers=SimpleNamespace(remote=self._num_workers),
            activate=SimpleNamespace(remote=self._activate),
        )

    async def _num_workers(self) -> dict[str, int]:
        return {"worker": self.total}

    async def _activate(self) -> None:
        self.num_activations += 1

    def _get(self, key: str, *, namespace: str) -> bytes | None:
        return self.stored.get((namespace, key))

    def _put(self, key: str, value: str, *, namespace: str) -> None:
        self.stored[namespace, key] = value.encode()

    async def start_gate(
        self, monkeypatch: pytest.MonkeyPatch, log_dir: Path, key_prefix: str = "ev-1"
    ) -> None:
        from cluster.ray import upgrade_gate

        store = SimpleNamespace(_internal_kv_get=self._get, _internal_kv_put=self._put)
        monkeypatch.setattr(upgrade_gate, "internal_kv", store)
        monkeypatch.setattr(upgrade_gate, "_running_workers", lambda names: ({"worker": 2}, True))
        gate: Any = upgrade_gate.UpgradeGate
        deployment: Any = object.__new__(gate.func_or_class)
        worker = SimpleNamespace(deployment_name="worker")
        with restored_logging():
            await deployment.__init__(self.router, log_dir, key_prefix, worker)


async def test_restarted_gate_does_not_activate_its_cluster_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old cluster's gate may be restarted after the new cluster has become the active one."""
    old, new = FakeRay(), FakeRay(total=4)
    for cluster in (old, new, old):
        await cluster.start_gate(monkeypatch, tmp_path)
    assert (old.num_activations, new.num_activations) == (1, 1)


async def test_gate_activates_another_model_in_the_same_ray_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A return to the first model activates the cluster again."""
    ray = FakeRay()
    for key_prefix in ("ev-1", "ev-2", "ev-1"):
        await ray.start_gate(monkeypatch, tmp_path, key_prefix)
    assert ray.num_activations == 3


async def test_gate_activates_again_if_the_mark_was_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RayError

    from cluster.ray import upgrade_gate

    ray, put = FakeRay(), FakeRay._put
    failures = [RayError("the head restarts")]

    def fail_once(self: FakeRay, key: str, value: str, *, namespace: str) -> None:
        if failures:
            raise failures.pop()
        put(self, key, value, namespace=namespace)

    monkeypatch.setattr(FakeRay, "_put", fail_once)
    monkeypatch.setattr(upgrade_gate, "_POLL_S", 0.0)
    await ray.start_gate(monkeypatch, tmp_path)
    assert ray.num_activations == 2 and ray.stored
