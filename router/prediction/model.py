"""Trained predictor in a JSON file, which is validated completely.

Pure.

It has no prompts and no names: of groups digests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from router.prediction.forest import Forest

KIND = "everlift output lengths"
VERSION = 1
#: Of an output's length, as a model predicts them.
QUANTILES = (0.5, 0.9)
#: A file of more bytes is not read.
MAX_BYTES = 16 << 20
#: Of a group: as many as a float counts exactly.
_MOST_OUTPUTS = 1 << 53
_COLUMNS = ("roots", "feature", "threshold", "left", "right", "value")

#: Words that are looked for, in small letters; how many of each line are there is a feature by this
#: name. They are English: what is asked in other languages is known by its template.
WORDS: dict[str, tuple[str, ...]] = {
    "ask": ("what", "who", "when", "where", "which", "whose", "is", "are", "does"),
    "reason": ("why", "how", "explain", "describe", "discuss", "analyse", "analyze", "compare"),
    "write": ("write", "story", "essay", "poem", "article", "blog", "letter", "email", "report"),
    "code": ("code", "function", "implement", "python", "class", "script", "debug", "program"),
    "list": ("list", "bullet", "enumerate", "examples", "ideas", "outline", "steps"),
    "summarise": ("summarise", "summarize", "summary", "tl;dr", "shorten", "abstract"),
    "translate": ("translate", "translation", "rewrite", "rephrase", "paraphrase", "correct"),
    "choose": ("classify", "label", "extract", "choose", "option", "sentiment", "yes", "no"),
    "brief": ("brief", "briefly", "short", "concise", "one", "single", "only", "just"),
    "thorough": ("detailed", "detail", "thorough", "comprehensive", "long", "complete", "full"),
    "think": ("think", "step", "prove", "solve", "calculate", "derive", "math", "proof"),
    "structured": ("json", "xml", "csv", "table", "yaml", "html", "schema", "sql"),
}
#: What ``Asked.static`` holds, in this order.
STATIC: tuple[str, ...] = (
    *("log_prompt_tokens", "log_max_tokens", "choices", "temperature", "stops", "grammar"),
    *("log_min_tokens", "hour", *WORDS),
    *("fences", "questions", "lines", "digits", "words", "ends_in_question", "ends_in_colon"),
)
#: Whose earlier outputs a request's are likely to resemble, from the widest on.
GROUPS: tuple[str, ...] = ("tenant", "application", "opening", "template")
#: What a forest is asked by, in this order.
FEATURES: tuple[str, ...] = (
    *STATIC,
    *(f"{group}_{what}" for group in GROUPS for what in ("log_mean", "log_spread", "log_count")),
)
#: A mean follows the last so many outputs.
_HISTORY_MEMORY = 64


class History(NamedTuple):
    """Mean and variance of the logarithms of a group's last outputs, up to 64.

    The first output is assumed to have variance 1.
    """

    outputs: int = 0
    mean: float = 0.0
    variance: float = 1.0

    def with_one(self, value: float) -> History:
        count = min(_HISTORY_MEMORY, self.outputs + 1)
        far = value - self.mean
        mean = self.mean + far / count
        seen = far * (value - mean) if self.outputs else 1.0
        return History(count, mean, self.variance + (seen - self.variance) / count)


@dataclass(frozen=True, slots=True)
class Model:
    """Model; ``forest`` has a sum for the natural logarithm of each of QUANTILES.

    ``served`` is the name of the model whose outputs they are. ``report`` is what training found,
    for people, with Kendall's ``tau``.
    """

    served: str
    forest: Forest
    histories: Mapping[str, History]
    tau: float
    report: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Parse a model. Raises ValueError with the cause."""
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
    """Return the file's text; ``forest`` holds Forest's arguments by name."""
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
