"""Structured logs."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from everlift import logs


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [h for h in root.handlers if h not in before]:
        root.removeHandler(handler)
        handler.close()
    for package in ("everlift", "router", "worker", "cluster"):
        logging.getLogger(package).setLevel(logging.NOTSET)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_event_is_one_json_line_with_fields(tmp_path: Path) -> None:
    logs.configure("router-0", path=tmp_path / "log")
    logs.get_logger("router.worker_sessions").info("worker lost", worker_id="w1", request_id="r\n1")
    (line,) = lines(tmp_path / "log")
    assert str(line.pop("ts")).endswith("+00:00")
    assert line == {
        "level": "info",
        "component": "router-0",
        "pid": os.getpid(),
        "logger": "router.worker_sessions",
        "event": "worker lost",
        "worker_id": "w1",
        "request_id": "r\n1",
    }


def test_log_drops_events_below_level(tmp_path: Path) -> None:
    logs.configure("c", "warning", tmp_path / "log")
    log = logs.get_logger("worker.engine.engine")
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [line["event"] for line in lines(tmp_path / "log")] == ["c", "d"]


def test_log_shows_third_party_events_from_warning(tmp_path: Path) -> None:
    logs.configure("c", "debug", tmp_path / "log")
    logging.getLogger("somebody.else").info("no")
    logging.getLogger("somebody.else").warning("%d yes", 1)
    assert [line["event"] for line in lines(tmp_path / "log")] == ["1 yes"]


def test_log_exception_has_traceback(tmp_path: Path) -> None:
    logs.configure("c", path=tmp_path / "log")
    try:
        raise ValueError("why")
    except ValueError:
        logs.get_logger("cluster.cli").exception("start failed", worker_id="w1")
    (line,) = lines(tmp_path / "log")
    assert (line["level"], line["event"], line["worker_id"]) == ("error", "start failed", "w1")
    assert "ValueError: why" in str(line["traceback"])


def test_log_field_cannot_replace_fixed_key(tmp_path: Path) -> None:
    logs.configure("c", path=tmp_path / "log")
    logs.get_logger("cluster.local.process").info("child started", pid=1, event="x")
    (line,) = lines(tmp_path / "log")
    assert line["event"] == "child started"
    assert (line["pid"], line["pid_"], line["event_"]) == (os.getpid(), 1, "x")


def test_log_writes_non_json_value_as_text(tmp_path: Path) -> None:
    logs.configure("c", path=tmp_path / "log")
    logs.get_logger("cluster.local.process").info("ready", path=Path("/x"))
    assert lines(tmp_path / "log")[0]["path"] == "/x"


def test_log_reconfiguration_replaces_handler(tmp_path: Path) -> None:
    logs.configure("c", path=tmp_path / "first")
    logs.configure("c", path=tmp_path / "second")
    logs.get_logger("cluster.local.process").info("ready")
    assert lines(tmp_path / "first") == []
    assert len(lines(tmp_path / "second")) == 1


def test_log_configure_rejects_unknown_level() -> None:
    with pytest.raises(ValueError, match="must be one of debug, info, warning, error"):
        logs.configure("c", "loud")
