"""Sampling defaults of a model, from its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everlift.chat_templates import read_object
from everlift.errors import OutOfRange, UnknownModel
from everlift.sampling import SamplingParams
from everlift.v1 import inference_pb2 as pb

_FILE = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def of_model(directory: Path) -> SamplingParams:
    """Return the sampling defaults that the generation_config.json in ``directory`` sets.

    Parameters that are absent or null there have Everlift's own defaults, and top_k -1 means no
    limit. A missing file sets nothing. do_sample is ignored, as in vLLM, so a request for greedy
    outputs must set temperature 0. Raises UnknownModel if the file cannot be read or is not a JSON
    object, and for a value of the wrong type or out of range.
    """
    path = directory / _FILE
    values = {name: value for name, value in read_object(path).items() if value is not None}
    try:
        return SamplingParams(**{name: _number(name, values) for name in _FIELDS if name in values})
    except (TypeError, OutOfRange) as error:
        raise UnknownModel(
            f"{path}: {error}; correct the file, or set router.sampling_defaults to none"
        ) from None


def _number(name: str, values: dict[str, Any]) -> Any:
    value = values[name]
    is_integer = type(value) is int
    if not is_integer and (name == "top_k" or type(value) is not float):
        kind = "an integer" if name == "top_k" else "a number"
        raise TypeError(f"{name} must be {kind}")
    if name == "top_k":
        return 0 if value == -1 else value
    try:
        return float(value)
    except OverflowError:
        raise TypeError(f"{name} is too large") from None


def as_proto(defaults: SamplingParams) -> pb.Sampling:
    """Return a message with the defaults of a model that differ from Everlift's own."""
    return pb.Sampling(**as_json(defaults))  # type: ignore[arg-type]


def as_json(defaults: SamplingParams) -> dict[str, float]:
    """Return a dict, by name, of the defaults of a model that differ from Everlift's own."""
    own = SamplingParams()
    return {
        name: getattr(defaults, name)
        for name in _FIELDS
        if getattr(defaults, name) != getattr(own, name)
    }
