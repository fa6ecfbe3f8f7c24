"""Where a running cluster is found."""

import json
import os
from pathlib import Path

import pytest

from cluster import endpoint


def test_a_cluster_is_found_while_it_runs(tmp_path: Path) -> None:
    assert endpoint.find(tmp_path) == []
    with endpoint.published(tmp_path, ["a:1", "b:2"]):
        assert endpoint.find(tmp_path) == ["a:1", "b:2"]
    assert endpoint.find(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_cluster_left_is_not_believed(tmp_path: Path) -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    (tmp_path / "endpoint.json").write_text(json.dumps({"addresses": ["a:1"], "pid": pid}))
    assert endpoint.find(tmp_path) == []


def test_who_ends_first_leaves_the_other_ones_file(tmp_path: Path) -> None:
    with endpoint.published(tmp_path, ["a:1"]):
        other = endpoint.published(tmp_path, ["b:2"])
        other.__enter__()
    assert endpoint.find(tmp_path) == ["b:2"]
    other.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_somebody_has_removed_is_no_matter(tmp_path: Path) -> None:
    with endpoint.published(tmp_path, ["a:1"]):
        (tmp_path / "endpoint.json").unlink()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "5", '{"addresses": 5, "pid": 1}'),
        *('{"addresses": ["a:1"], "pid": "1"}', f'{{"addresses": ["a:1"], "pid": {10**30}}}'),
    ],
)
def test_a_broken_file_is_no_cluster(tmp_path: Path, text: str) -> None:
    (tmp_path / "endpoint.json").write_text(text)
    assert endpoint.find(tmp_path) == []
