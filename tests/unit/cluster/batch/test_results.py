"""File of a batch's results."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cluster.batch.results import Results
from cluster.errors import BatchFailed


def good(custom_id: str, text: str = "x") -> dict[str, object]:
    response = {"status_code": 200, "request_id": "r", "body": {"text": text}}
    return {
        "id": f"batch_req_{custom_id}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }


def bad(custom_id: str, message: str = "m") -> dict[str, object]:
    error = {"code": "internal", "message": message}
    return {
        "id": f"batch_req_{custom_id}",
        "custom_id": custom_id,
        "response": None,
        "error": error,
    }


def refused(custom_id: str) -> dict[str, object]:
    return {**good(custom_id), "response": {"status_code": 400, "body": {"error": {}}}}


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def test_results_are_recognised_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        results.append(good("a", "é\ud800\n"))
        results.append(bad("b"))
        results.append(refused("c"))
    with Results(path) as results:
        assert [name in results for name in "abcd"] == [True, True, True, False]
        assert (results.num_done("abcd"), results.num_failed("abcd")) == (3, 2)
    assert ids(path) == ["a", "b", "c"]


@pytest.mark.parametrize("torn", ['{"id": "batch_req_b", "cu', "\0\0\0", json.dumps(good("b"))])
def test_torn_last_line_is_dropped(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps(good("a")) + "\n" + torn)
    with Results(path) as results:
        assert ("a" in results, "b" in results) == (True, False)
        results.append(good("b", "y"))
    assert ids(path) == ["a", "b"]


@pytest.mark.parametrize(
    "line", ["hello", "[]", "{}", '{"custom_id": "a"}', '{"custom_id": 3, "error": {}}', '"id"']
)
def test_foreign_file_is_left_unchanged(line: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(f"{json.dumps(good('a'))}\n{line}\ntorn")
    with pytest.raises(BatchFailed, match=r"not a file of results \(line 2\)"):
        Results(path)
    assert path.read_text().endswith("\ntorn")


@pytest.mark.parametrize("torn", ["{", '{"id"', '{"id": "batch_req_', '{"id": "batch_req_7", "cu'])
def test_torn_first_line_is_dropped(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(torn)
    with Results(path) as results:
        results.append(good("a"))
    assert ids(path) == ["a"]


@pytest.mark.parametrize("content", ["precious", "[1]", "\0\0", '{"id": 3, "te', '{"id": "a", "pr'])
def test_foreign_partial_line_is_left_unchanged(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(BatchFailed, match=r"not a file of results \(line 1\)"):
        Results(path)
    assert path.read_text() == content


def test_results_file_allows_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path), pytest.raises(BatchFailed, match="another batch writes"):
        Results(path)
    Results(path).close()


def test_retry_replaces_the_error_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        for record in (bad("a"), refused("b"), good("c")):
            results.append(record)
    with Results(path, retry_failed=True) as results:
        assert [name in results for name in "abc"] == [False, False, True]
        assert [results.attempt(name) for name in "ab"] == [2, 2]
        results.append(good("a"))
        results.append(bad("b", "second"))
    records = {it["custom_id"]: it for it in map(json.loads, path.read_text().splitlines())}
    assert len(path.read_text().splitlines()) == len(records) == 3
    assert records["a"]["error"] is None
    assert (records["b"]["error"]["message"], records["b"]["attempt"]) == ("second", 2)
    with Results(path) as results:
        assert (results.num_done("abc"), results.num_failed("abc")) == (3, 1)
        assert results.attempt("b") == 3


def test_large_file_of_results_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of one write, which is 2 GiB in the kernel, is small here."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:4096]))
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        for name in "abc":
            results.append(bad(name, "m" * 2000))
    with Results(path, retry_failed=True) as results:
        results.append(good("a"))
    assert ids(path) == ["a", "b", "c"]


def test_interrupted_retry_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(bad(name)) + "\n" for name in "ab"))
    retrying = Results(path, retry_failed=True)
    retrying.append(good("a"))
    # Killed here: both records of the line are in the file.
    os.close(retrying._descriptor)
    assert ids(path) == ["a", "b", "a"]
    with Results(path, retry_failed=True) as results:
        assert ("a" in results, "b" in results) == (True, False)
        assert results.attempt("b") == 2
    assert ids(path) == ["a", "b"]
    assert list(tmp_path.iterdir()) == [path]


def test_results_are_rewritten_after_a_killed_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    records = [bad("a"), good("a")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "out.jsonl.everlift-new").write_text(json.dumps(good("b"))[:30])
    # A copy made by the user, whose suffix equals a process id, as it may in a container.
    copy = tmp_path / f"out.jsonl.{os.getpid()}"
    copy.write_text("precious")
    Results(path).close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [good("a")]
    assert copy.read_text() == "precious"
    assert {*tmp_path.iterdir()} == {path, copy}
