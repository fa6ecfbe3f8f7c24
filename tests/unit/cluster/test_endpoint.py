"""File with the addresses of a running cluster."""

import fcntl
import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from cluster import endpoint


def test_endpoint_is_found_only_while_published(tmp_path: Path) -> None:
    assert endpoint.find(tmp_path) == []
    with endpoint.published(tmp_path, ["a:1", "b:2"]):
        assert endpoint.find(tmp_path) == ["a:1", "b:2"]
    assert endpoint.find(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_endpoint_file_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    # A restarted process in a container has the same process id as the killed one.
    text = json.dumps({"addresses": ["a:1"], "pid": os.getpid()})
    (tmp_path / "endpoint.json").write_text(text)
    assert endpoint.find(tmp_path) == []


def test_endpoint_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from cluster import endpoint\n"
        "with endpoint.published(pathlib.Path(sys.argv[1]), ['a:1']): print(flush=True); input()"
    )
    with Popen([sys.executable, "-c", code, tmp_path], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert endpoint.running(tmp_path) == endpoint.Running(["a:1"], process.pid)
        process.kill()
        process.wait()
        assert endpoint.find(tmp_path) == []


def test_endpoint_file_of_another_cluster_is_kept(tmp_path: Path) -> None:
    with endpoint.published(tmp_path, ["a:1"]):
        other = endpoint.published(tmp_path, ["b:2"])
        other.__enter__()
    assert endpoint.find(tmp_path) == ["b:2"]
    other.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_endpoint_tolerates_a_removed_file(tmp_path: Path) -> None:
    with endpoint.published(tmp_path, ["a:1"]):
        (tmp_path / "endpoint.json").unlink()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "5", '{"addresses": 5, "pid": 1}'),
        *('{"addresses": ["a:1"], "pid": "1"}'),
    ],
)
def test_endpoint_malformed_file_is_ignored(tmp_path: Path, text: str) -> None:
    with (tmp_path / "endpoint.json").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)
        file.flush()
        assert endpoint.find(tmp_path) == []
