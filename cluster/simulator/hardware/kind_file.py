"""JSON file that describes a kind of worker.

    {
      "step_time": {"overhead_s": 0.0007, "weights_s": 0.0041, "token_s": 2.4e-05,
                    "kv_token_s": 3.6e-08, "pair_s": 8.9e-10, "row_s": 1.8e-06},
      "worker": {"num_blocks": 26000, "max_model_len": 131072}
    }

``step_time`` has the fields of ``everlift.step_time.Roofline``. ``worker`` has settings of a worker
by key, which replace the defaults; settings of the configuration replace these in turn. Other
sections are ignored: they may document, for example, how the figures were measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from math import isfinite
from pathlib import Path

from cluster.errors import ForecastFailed
from cluster.simulator.hardware.kind import Kind
from everlift import settings
from everlift.errors import SettingsError
from everlift.step_time import Roofline


def read(path: Path) -> Kind:
    """Read a kind of worker from a file.

    Raises ForecastFailed for an invalid or unreadable file.
    """
    try:
        return parse_kind(path.stem, _content(path))
    except ValueError as error:
        raise ForecastFailed(f"{path}: {error}") from None


def parse_kind(name: str, content: object) -> Kind:
    """Return the kind of worker that the decoded JSON of a file describes.

    Raises ValueError for invalid content.
    """
    sections = _object(content)
    try:
        step_time = settings.load(Roofline, _object(sections.get("step_time")))
    except SettingsError as error:
        raise ValueError(f"step_time.{error}") from None
    if not all(isfinite(value) and value >= 0 for value in astuple(step_time)):
        raise ValueError("step_time: all values must be finite and at least 0")
    if not step_time.overhead_s + step_time.weights_s > 0:
        raise ValueError("step_time: overhead_s or weights_s must be above 0")
    return Kind(name, step_time, _object(sections.get("worker", {})))


def _content(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ForecastFailed(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ForecastFailed(f"{path}: is not JSON") from None


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError("must have a section step_time, and may have a section worker")
    return value
