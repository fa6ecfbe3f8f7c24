"""Forecasts as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from cluster.simulator.forecast import Forecast
from cluster.simulator.summary import Slo, Summary


def write(content: Mapping[str, object], path: Path) -> None:
    """Write ``content`` as JSON to ``path``, and create its folder if needed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def forecast_as_json(forecast: Forecast, slo: Slo) -> dict[str, object]:
    """Return a forecast as a JSON object.

    The object has ``slo``, one summary of all requests together, and one summary of each class,
    tenant and application. The samples, the workers' connected time in seconds, and the numbers of
    steps are also included.
    """
    return {
        "slo": plain(asdict(slo)),
        "all": summary_as_json(forecast.summary(slo)),
        "by_class": _parts(forecast.by_class(slo)),
        "by_tenant": _parts(forecast.by_tenant(slo)),
        "by_application": _parts(forecast.by_application(slo)),
        "worker_s": forecast.worker_s,
        "num_steps": forecast.num_steps,
        "num_jumped": forecast.num_jumped,
        "samples": [asdict(sample) for sample in forecast.samples],
    }


def summary_as_json(summary: Summary) -> object:
    return plain(asdict(summary))


def plain(value: object) -> object:
    """Return ``value`` as JSON values; infinite numbers and NaN become None.

    Mappings become dicts with text keys, and sequences become lists, recursively.
    """
    match value:
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {str(key): plain(each) for key, each in value.items()}
        case Sequence() if not isinstance(value, str):
            return [plain(each) for each in value]
        case _:
            return value


def _parts(parts: Mapping[int, Summary] | Mapping[str, Summary]) -> dict[str, object]:
    return {str(name): summary_as_json(part) for name, part in parts.items()}
