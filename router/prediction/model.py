"""A predictor that was trained, as it lies in a file: JSON, and of what it holds nothing is taken
on trust. Pure.

It has no prompts and no names: of groups digests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from router.prediction.forest import Forest
from router.prediction.histories import FEATURES, History

KIND = "everlift output lengths"
VERSION = 1
#: Of an output's length, as a model predicts them.
QUANTILES = (0.5, 0.9)
#: A file of more bytes is not read.
MAX_BYTES = 16 << 20
#: Of a group: as many as a float counts exactly.
_MOST_OUTPUTS = 1 << 53
_COLUMNS = ("roots", "feature", "threshold", "left", "right", "value")


@dataclass(frozen=True, slots=True)
class Model:
    """``forest`` has a sum for the natural logarithm of each of QUANTILES. ``served`` is the name
    of the model whose outputs they are. ``report`` is what training found, for people, with
    Kendall's ``tau``."""

    served: str
    forest: Forest
    histories: Mapping[str, History]
    tau: float
    report: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Raises ValueError with what is wrong with it."""
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("is not JSON") from None
        if not isinstance(plain, dict) or plain.get("kind") != KIND:
            raise ValueError("is no predictor of output lengths")
        if plain.get("version") != VERSION:
            raise ValueError(f"is of version {plain.get('version')!r}, and {VERSION} is read")
        if plain.get("features") != list(FEATURES):
            raise ValueError("was trained for other features: train it again")
        if plain.get("quantiles") != list(QUANTILES):
            raise ValueError(f"has other quantiles than {QUANTILES}")
        try:
            return cls._parsed(plain)
        except (LookupError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"is not whole: {type(error).__name__}: {error}") from None

    @classmethod
    def _parsed(cls, plain: Mapping[str, Any]) -> Self:
        served = plain["served"]
        if not isinstance(served, str):
            raise TypeError("served must be a name")
        forest, report, known = (_object(plain, name) for name in ("forest", "report", "histories"))
        if len(forest["roots"]) != len(QUANTILES):
            raise ValueError("has not one sum for each quantile")
        columns = {name: forest[name] for name in _COLUMNS}
        grown = Forest(**columns, num_features=len(FEATURES))
        histories = {str(group): _history(*its) for group, its in known.items()}
        return cls(served, grown, histories, _number(report["tau"]), report)


def text(
    served: str,
    forest: Mapping[str, Any],
    histories: Mapping[str, History],
    report: Mapping[str, Any],
) -> str:
    """The file. ``forest`` is what Forest is made of, by its arguments' names."""
    plain = {
        "kind": KIND,
        "version": VERSION,
        "served": served,
        "features": FEATURES,
        "quantiles": QUANTILES,
        "report": report,
        "forest": forest,
        "histories": histories,
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def _object(plain: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = plain[name]
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be an object")
    return value


def _history(count: int, mean: float, variance: float) -> History:
    if not 0 <= count <= _MOST_OUTPUTS or variance < 0:
        raise ValueError("a history counts or varies below 0, or counts too many")
    return History(int(count), _number(mean), _number(variance))


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return float(value)
