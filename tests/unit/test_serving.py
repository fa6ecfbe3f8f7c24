"""What `everlift up` says of the cluster that it has started."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from cluster.autoscale.config import AutoscaleConfig
from cluster.config import Config, load
from cluster.processes import ProcessCluster
from cluster.serving import _welcome, workers

ADDRESSES = ("address", "http_address", "metrics_address")


@pytest.mark.parametrize(
    "config, words",
    [
        (Config(num_workers=1), "1 worker"),
        (Config(num_workers=2), "2 workers"),
        (
            Config(autoscale=AutoscaleConfig(min_workers=0, max_workers=3)),
            "0 to 3 workers, as its queue needs them",
        ),
    ],
)
def test_how_many_workers_there_are_is_said(config: Config, words: str) -> None:
    assert workers(config) == words


def test_who_has_no_home_is_told_where_the_cluster_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    config = load(None, {}, ["model=fake", f"state_dir={tmp_path}"])
    monkeypatch.setattr(ProcessCluster, "addresses", ["127.0.0.1:5"])
    said = io.StringIO()
    console = Console(file=said, width=200)
    _welcome(config, ProcessCluster(config), console)
    assert "everlift status --watch --address 127.0.0.1:5" in said.getvalue()


def test_addresses_and_paths_are_said_as_they_are() -> None:
    cluster = ProcessCluster(Config())
    cluster.routers = [cast("Any", SimpleNamespace(**dict.fromkeys(ADDRESSES, "[fd00::1]:8000")))]
    config = Config(model="/models/[bold]", state_dir=Path("/runs/[/home]"))
    console = Console(highlight=False)
    with console.capture() as capture:
        _welcome(config, cluster, console)
    said = capture.get()
    assert said.count("[fd00::1]:8000") == 6
    assert "/runs/[/home]/logs" in said and "serves [bold] with" in said
