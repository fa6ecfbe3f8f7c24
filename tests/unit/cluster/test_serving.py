"""Messages of `everlift up` about the cluster that it has started."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from cluster import endpoint
from cluster.autoscale.config import AutoscaleConfig
from cluster.commands.up import _check_not_running, _welcome, workers
from cluster.config import Config, load
from cluster.errors import ClusterFailed
from cluster.local.processes import ProcessCluster
from cluster.served import Served, curl, first_request
from cluster.stages import Stages

SERVED = Served(context=4096, longest=4096, has_template=False)
ADDRESSES = ("address", "http_address", "metrics_address")


@pytest.mark.parametrize(
    "config, words",
    [
        (Config(num_workers=1), "1 worker"),
        (Config(num_workers=2), "2 workers"),
        (
            Config(autoscale=AutoscaleConfig(min_workers=0, max_workers=3)),
            "0 to 3 workers, autoscaled",
        ),
    ],
)
def test_up_describes_the_number_of_workers(config: Config, words: str) -> None:
    assert workers(config.groups[0]) == words


def test_up_describes_the_workers_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ["model=fake", "models.a.model=org/a", "models.a.num_workers=2"]
    monkeypatch.setattr(ProcessCluster, "addresses", ["127.0.0.1:5"])
    config, said = load(None, {}, models), io.StringIO()
    _welcome(config, ProcessCluster(config), SERVED, Console(file=said, width=200))
    assert "serves fake with 1 worker, org/a with 2 workers; Ctrl-C" in said.getvalue()


def test_up_without_a_home_directory_prints_the_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    config = load(None, {}, ["model=fake", f"state_dir={tmp_path}"])
    monkeypatch.setattr(ProcessCluster, "addresses", ["127.0.0.1:5"])
    said = io.StringIO()
    console = Console(file=said, width=200)
    _welcome(config, ProcessCluster(config), SERVED, console)
    assert "everlift status --watch --address 127.0.0.1:5" in said.getvalue()


def test_up_shows_brackets_in_addresses_and_paths_literally() -> None:
    cluster = ProcessCluster(Config())
    cluster.routers = [cast("Any", SimpleNamespace(**dict.fromkeys(ADDRESSES, "[fd00::1]:8000")))]
    config = Config(model="/models/[bold]", state_dir=Path("/runs/[/home]"))
    console = Console(highlight=False)
    with console.capture() as capture:
        _welcome(config, cluster, SERVED, console)
    said = capture.get()
    assert said.count("[fd00::1]:8000") == 7
    assert "/runs/[/home]/logs" in said and "serves [bold] with" in said


@pytest.mark.parametrize(
    ("settings", "longest", "why"),
    [
        (["worker.num_blocks=4"], 128, "the KV cache holds no more: raise worker.num_blocks"),
        ([], 96, "the KV cache of 256 MiB holds no more: raise worker.kv_cache_mib"),
        (
            ["worker.kv_cache_mib=7"],
            64,
            "of 7 MiB holds no more: raise worker.kv_cache_mib",
        ),
        (["worker.max_model_len=512"], 512, "worker.max_model_len is lower"),
        (["worker.device=cuda"], 512, "the GPU has no room for more: raise worker.tensor_parallel"),
    ],
)
def test_up_explains_a_shortened_context(settings: list[str], longest: int, why: str) -> None:
    said = Served(1024, longest, True, has_gpus=False).shorter(load(None, {}, settings))
    assert said.startswith(f"{longest} of the model's 1,024 tokens; ")
    assert said.endswith(why)


def test_up_explains_a_shortened_context_by_gpu_memory() -> None:
    assert "the GPU has no room" in Served(1024, 512, True, has_gpus=True).shorter(Config())


def test_up_explains_no_full_or_unknown_context() -> None:
    assert Served(1024, 1024, True).shorter(Config()) == ""
    assert Served(1024, 0, True).shorter(Config()) == ""


def test_up_suggests_a_request_that_fits_the_model(tmp_path: Path) -> None:
    chat, text = Served(1024, 1024, True), Served(1024, 1024, False)
    other = Config(model=str(tmp_path))
    assert first_request(Config(), chat).startswith('everlift generate "count from')
    assert first_request(other, chat) == "everlift chat --temperature 0"
    assert first_request(other, text).startswith("everlift generate")
    assert "/v1/chat/completions" in curl(other, chat, "http://here")
    assert "/v1/completions" in curl(other, text, "http://here")
    assert "authorization" not in curl(other, text, "http://here")
    with_keys = load(None, {}, ["router.access=ledger"])
    assert "Bearer $EVERLIFT_API_KEY" in curl(with_keys, chat, "http://here")


def test_stages_print_one_line_each_with_a_result() -> None:
    said = io.StringIO()
    stages = Stages(Console(file=said, width=200))
    with stages.shown(), stages.stage("ledger", "starting") as stage:
        stage.result = "in [/home]"
    begun, over = said.getvalue().splitlines()
    assert begun == "  ledger   starting ..."
    assert over.startswith("  ledger   in [/home] (0.")
    with pytest.raises(ClusterFailed), stages.stage("workers", "loading m"):
        raise ClusterFailed("no memory")
    # A failed stage has no result.
    assert said.getvalue().splitlines()[2:] == ["  workers  loading m ..."]


def test_up_rejects_a_second_cluster_in_a_state_directory(tmp_path: Path) -> None:
    config = load(None, {}, [f"state_dir={tmp_path}"])
    _check_not_running(config)
    with endpoint.published(tmp_path, ["127.0.0.1:5"]):
        with pytest.raises(
            ClusterFailed, match=r"already running: process \d+, at 127.0.0.1:5\. Stop"
        ):
            _check_not_running(config)
        # A cluster with an external ledger may use the directory of a running cluster.
        _check_not_running(load(None, {}, [f"state_dir={tmp_path}", "ledger.url=redis://h:1"]))
    _check_not_running(config)
