"""Structured logs: one line of JSON per event, on standard error or in a file.

    log = logs.get_logger(__name__)
    log.info("request finished", request_id=request_id, output_tokens=17)

A line contains ts, level, component, pid, logger and event, then the fields that the caller passed,
then ``traceback`` if an exception is logged, and nothing else. Callers must not pass prompts, token
ids or secrets. A field with the name of one of the first six keys gets a trailing underscore.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

#: Packages whose events follow the configured level. Other packages log warnings and errors.
_PACKAGES = ("everlift", "router", "worker", "cluster")
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class Logger:
    """Logger of the events of one module."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, event, fields, exc_info=True)

    def _log(
        self, level: int, event: str, fields: Mapping[str, object], exc_info: bool = False
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(
                level, "%s", event, exc_info=exc_info, extra={"everlift_fields": fields}
            )


def get_logger(name: str) -> Logger:
    """Return the logger of module ``name``, which writes lines of JSON only after ``configure``.

    Before that, Python's own logging handles the events: without other handlers, it writes the
    texts of warnings and errors, without their fields, to standard error.
    """
    return Logger(logging.getLogger(name))


def configure(component: str, level: str = "info", path: Path | None = None) -> None:
    """Write this process's events of ``level`` and above to ``path``, or to standard error.

    ``component`` names the process, such as "router-0" or "worker-1.rank-0". A later call replaces
    the configuration of an earlier one. Raises ValueError for an unknown level.
    """
    set_level(level)
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h.formatter, _JsonFormatter)]:
        root.removeHandler(handler)
        handler.close()
    handler = logging.StreamHandler() if path is None else _to_file(path)
    handler.setFormatter(_JsonFormatter(component))
    root.addHandler(handler)


def set_level(level: str) -> None:
    """Set the lowest level of written events. Raises ValueError for an unknown level."""
    if level not in _LEVELS:
        raise ValueError(f"log level must be one of {', '.join(_LEVELS)}, not {level!r}")
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(_LEVELS[level])


def _to_file(path: Path) -> logging.FileHandler:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return logging.FileHandler(path)


class _JsonFormatter(logging.Formatter):
    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "pid": record.process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields: Mapping[str, object] = getattr(record, "everlift_fields", {})
        line |= {f"{key}_" if key in line else key: value for key, value in fields.items()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
