"""Trained predictor in a JSON file, which is validated completely. Pure.

The file contains no prompts and no names of tenants or applications; groups are digests.
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
#: Quantiles of an output's length that a model predicts.
QUANTILES = (0.5, 0.9)
#: Maximum size of a predictor's file in bytes.
MAX_BYTES = 16 << 20
#: Maximum number of outputs of a group. A float represents every count up to it exactly.
_MOST_OUTPUTS = 1 << 53
_COLUMNS = ("roots", "feature", "threshold", "left", "right", "value")

#: English words in lower case, by feature. The value of a feature is how many different words of
#: its list occur in the first 32 and the last 64 tokens of the prompt. Requests in other languages
#: are recognised by their template.
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
#: Names of the values of ``RequestFeatures.static``, in this order.
STATIC: tuple[str, ...] = (
    *("log_prompt_tokens", "log_max_tokens", "choices", "temperature", "stops", "grammar"),
    *("log_min_tokens", "hour", *WORDS),
    *("fences", "questions", "lines", "digits", "words", "ends_in_question", "ends_in_colon"),
)
#: Kinds of groups of requests with similar outputs, from the widest to the narrowest.
GROUPS: tuple[str, ...] = ("tenant", "application", "opening", "template")
#: Names of the features of a forest, in this order.
FEATURES: tuple[str, ...] = (
    *STATIC,
    *(f"{group}_{what}" for group in GROUPS for what in ("log_mean", "log_spread", "log_count")),
)
#: Approximate number of most recent outputs that mean and variance cover.
_HISTORY_MEMORY = 64


class History(NamedTuple):
    """Running mean and variance of the natural logarithms of the lengths of a group's outputs.

    Mean and variance cover about the last 64 outputs. ``outputs`` counts the outputs, but only up
    to 64. After the first output the variance is assumed to be 1.
    """

    outputs: int = 0
    mean: float = 0.0
    variance: float = 1.0

    def with_one(self, value: float) -> History:
        """Return the history with one more output; ``value`` is the logarithm of its length."""
        count = min(_HISTORY_MEMORY, self.outputs + 1)
        difference = value - self.mean
        mean = self.mean + difference / count
        square = difference * (value - mean) if self.outputs else 1.0
        return History(count, mean, self.variance + (square - self.variance) / count)


@dataclass(frozen=True, slots=True)
class Model:
    """Trained model that predicts the QUANTILES of an output's length.

    For each quantile, ``forest`` has one sum: the natural logarithm of this quantile in tokens.
    ``served`` is the name of the language model whose outputs it was trained on. ``histories`` has,
    by digest, the History of each group of requests in the examples, and that of all requests under
    the key "all". ``tau`` is Kendall's tau between the predicted and the actual lengths of the
    examples that were not used for training. ``report`` contains all results of the training, for
    people to read.
    """

    served: str
    forest: Forest
    histories: Mapping[str, History]
    tau: float
    report: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Return the model that the text of a predictor's file contains.

        Raises ValueError, with the cause, if the text is not a valid model.
        """
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("is not JSON") from None
        if not isinstance(plain, dict) or plain.get("kind") != KIND:
            raise ValueError("is not a predictor of output lengths")
        if plain.get("version") != VERSION:
            raise ValueError(f"has version {plain.get('version')!r}; the router reads {VERSION}")
        if plain.get("features") != list(FEATURES):
            raise ValueError("was trained for other features: train it again")
        if plain.get("quantiles") != list(QUANTILES):
            raise ValueError(f"has other quantiles than {QUANTILES}: train it again")
        try:
            return cls._parsed(plain)
        except (LookupError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"is malformed: {type(error).__name__}: {error}") from None

    @classmethod
    def _parsed(cls, plain: Mapping[str, Any]) -> Self:
        served = plain["served"]
        if not isinstance(served, str):
            raise TypeError("served must be a name")
        forest, report, known = (_object(plain, name) for name in ("forest", "report", "histories"))
        if len(forest["roots"]) != len(QUANTILES):
            raise ValueError(f"must have one sum for each of {len(QUANTILES)} quantiles")
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
    """Return the text of a predictor's file; ``forest`` holds the arguments of Forest by name."""
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
        raise ValueError(
            f"a history's count must be from 0 to {_MOST_OUTPUTS}, its variance at least 0"
        )
    return History(int(count), _number(mean), _number(variance))


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"a number must be finite, not {value}")
    return float(value)
