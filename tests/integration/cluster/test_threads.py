"""OpenMP threads of ranks: as many as configured, and asleep while they wait.

OpenMP prints its settings to the log of the process that imports torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL, load
from cluster.local.processes import ProcessCluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch comes with libgomp there")

ROOT = Path(__file__).parents[3]
#: OpenMP's variables for the spins of a thread before it sleeps and for the number of threads, and
#: the number of spins that Everlift sets.
WAITING = "GOMP_SPINCOUNT"
THREADS = "OMP_NUM_THREADS"
SLEEPS = "500"


def said(text: str, name: str) -> str:
    """Return the value of ``name`` that OpenMP printed."""
    found = re.search(rf"{name} = '(.*)'", text)
    assert found is not None, f"nothing is said of {name} in:\n{text}"
    return found[1]


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", WAITING):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("revive", "ranks", "files"),
    [
        (False, 2, ["worker-0.log", "worker-0.1.log"]),
        pytest.param(True, 1, ["fork-server.log"], marks=pytest.mark.long),
    ],
    ids=["processes", "fork server"],
)
async def test_cluster_ranks_use_their_threads_and_wait_passively(
    revive: bool, ranks: int, files: list[str], tmp_path: Path
) -> None:
    settings = [
        f"state_dir={tmp_path}",
        "router.port=0",
        "router.http_host=",
        f"worker.tensor_parallel={ranks}",
        "worker.num_threads=3",
        "worker.num_blocks=16",
    ]
    async with ProcessCluster(load(None, {}, settings), revive=revive):
        logs = [(tmp_path / "logs" / file).read_text() for file in files]
    assert [(said(log, WAITING), said(log, THREADS)) for log in logs] == [(SLEEPS, "3")] * ranks


AN_LLM = """
import sys
{before}
from cluster import LLM
with LLM(sys.argv[1], tensor_parallel={ranks}, num_threads=3, num_blocks=16, max_num_seqs=8):
    import torch
    assert torch.get_num_threads() == 3
"""


def llm(before: str, ranks: int, state: Path, **more: str) -> str:
    """Return the standard error of a process that runs an LLM."""
    environment = os.environ | {"XDG_STATE_HOME": str(state), **more}
    script = AN_LLM.format(before=before, ranks=ranks)
    command = [sys.executable, "-c", script, str(DEMO_MODEL)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_llm_ranks_use_their_threads_and_wait_passively(tmp_path: Path) -> None:
    first = llm("", 2, tmp_path)
    other = (tmp_path / "everlift" / "logs" / "offline.1.log").read_text()
    assert (said(first, WAITING), said(other, WAITING)) == (SLEEPS, SLEEPS)
    assert said(other, THREADS) == "3"
    assert "torch was imported" not in first


@pytest.mark.long
def test_llm_warns_of_an_earlier_torch_import(tmp_path: Path) -> None:
    stderr = llm("import torch", 1, tmp_path)
    assert said(stderr, WAITING) != SLEEPS
    assert "torch was imported without OMP_WAIT_POLICY=PASSIVE" in stderr


@pytest.mark.long
def test_llm_keeps_omp_settings_of_the_environment(tmp_path: Path) -> None:
    assert said(llm("", 1, tmp_path, OMP_WAIT_POLICY="PASSIVE"), WAITING) == SLEEPS
    assert said(llm("", 1, tmp_path, GOMP_SPINCOUNT="77"), WAITING) == "77"


@pytest.mark.long
def test_llm_does_not_warn_if_omp_wait_policy_is_set(tmp_path: Path) -> None:
    stderr = llm("import torch", 1, tmp_path, OMP_WAIT_POLICY="ACTIVE")
    assert said(stderr, WAITING) != SLEEPS
    assert "torch was imported" not in stderr
