"""File with the addresses of a running cluster."""

import json
import os
from pathlib import Path

import pytest

from cluster import endpoint


def test_endpoint_is_found_only_while_published(tmp_path: Path) -> None:
    assert endpoint.find(tmp_path) == []
    with endpoint.published(tmp_path, ["a:1", "b:2"]):
        assert endpoint.find(tmp_path) == ["a:1", "b:2"]
    assert endpoint.find(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_endpoint_file_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    (tmp_path / "endpoint.json").write_text(json.dumps({"addresses": ["a:1"], "pid": pid}))
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
        *('{"addresses": ["a:1"], "pid": "1"}', f'{{"addresses": ["a:1"], "pid": {10**30}}}'),
    ],
)
def test_endpoint_malformed_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "endpoint.json").write_text(text)
    assert endpoint.find(tmp_path) == []
