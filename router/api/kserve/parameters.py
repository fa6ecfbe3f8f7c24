"""Request parameters, named as in Triton's backends for vLLM and TensorRT-LLM. Pure.

A client may send a parameter as a request parameter, as an input tensor, or as a key of the JSON
object ``sampling_parameters``, which is itself a request parameter or an input tensor. Numbers may
be written as text, because clients of these backends do so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from everlift.checks import Range
from everlift.errors import InvalidRequest, NotUtf8, OutOfRange, TooManyStops
from everlift.messages import (
    MAX_BAD_WORDS,
    MAX_PRIORITY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    check_field,
)
from everlift.sampling import unsigned_seed
from everlift.v1 import inference_pb2 as wire
from router.api.kserve.tensors import Scalar

Value = Scalar | str
#: All values that a request has for one name.
Values = Sequence[Value]
N = TypeVar("N", int, float)

#: Name of the parameter whose value is a JSON object of other parameters.
NESTED = "sampling_parameters"
#: Maximum length of the text of NESTED in characters. The longest valid values, all escaped, have
#: about 600,000 characters.
_MAX_NESTED = 1 << 20
#: Triton's priority that corresponds to Everlift's default class. In Triton, 1 is the highest
#: priority and 0 stands for the default.
_MIDDLE_PRIORITY = MAX_PRIORITY + 1
_LOWEST_PRIORITY = _MIDDLE_PRIORITY + MAX_PRIORITY
_MICROSECONDS = Range(0, int(RANGES["timeout_ms"].high) * 1000)


@dataclass(slots=True)
class ParsedRequest:
    """Request to submit (``generate``), and the client's options for the answer.

    ``is_streamed`` is None if the client did not choose. ``outputs`` has the names of the requested
    tensors; empty means all outputs. ``has_empty_final``: the client wants an empty response after
    the last output.
    """

    generate: wire.GenerateRequest = field(default_factory=wire.GenerateRequest)
    outputs: frozenset[str] = frozenset()
    is_streamed: bool | None = None
    has_empty_final: bool = False


Setter = Callable[[ParsedRequest, str, Values], None]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Description of a request parameter, which may be sent under any of ``names``.

    ``datatype`` is the datatype of its input tensor, ``max_values`` the maximum number of values.
    ``set`` writes the values into a ``ParsedRequest``; it raises InvalidRequest if they are
    invalid.
    """

    names: tuple[str, ...]
    datatype: str
    max_values: int
    set: Setter

    @property
    def dims(self) -> int:
        """Return the size of the input tensor's only dimension: 1, or -1 for any size."""
        return 1 if self.max_values == 1 else -1


def parse(parameters: Iterable[tuple[str, Values]]) -> ParsedRequest:
    """Return the request to submit, and the client's options for the answer.

    ``parameters`` has pairs of a parameter's name and its values. Raises InvalidRequest for an
    unknown or repeated parameter, and for invalid values.
    """
    result, seen = ParsedRequest(), set[Parameter]()
    for name, values in _flat(parameters):
        parameter = _known(name)
        if parameter in seen:
            raise InvalidRequest(f"{' or '.join(parameter.names)} must be given only once")
        seen.add(parameter)
        parameter.set(result, name, values)
    return result


def check_count(name: str, count: int) -> None:
    """Check that ``count`` values are allowed for the parameter ``name``.

    Raises InvalidRequest if the parameter is unknown or must have one value, and TooManyStops if
    its list is too long.
    """
    max_values = 1 if name == NESTED else _known(name).max_values
    if max_values == 1:
        _check_one(name, count)
    elif count > max_values:  # only stop strings, stop tokens and bad words are lists
        raise TooManyStops(f"{name} has {count} values; at most {max_values} are allowed")


def _known(name: str) -> Parameter:
    if (parameter := _BY_NAME.get(name)) is None:
        raise InvalidRequest(f"unknown parameter {name!r}; ModelMetadata lists all parameters")
    return parameter


def _flat(parameters: Iterable[tuple[str, Values]]) -> Iterator[tuple[str, Values]]:
    for name, values in parameters:
        if name == NESTED:
            yield from _nested(_text(name, _one(name, values)))
        else:
            yield name, values


def _nested(text: str) -> Iterator[tuple[str, Values]]:
    if len(text) > _MAX_NESTED:
        raise OutOfRange(f"{NESTED} has {len(text)} characters; at most {_MAX_NESTED} are allowed")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{NESTED} is not JSON") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{NESTED} is not a JSON object")
    for name, value in found.items():
        if isinstance(value, list):
            check_count(name, len(value))
            yield name, value
        elif value is not None:
            yield name, [value]


# values


def _check_one(name: str, count: int) -> None:
    if count != 1:
        raise InvalidRequest(f"{name} has {count} values; expected one")


def _one(name: str, values: Values) -> Value:
    _check_one(name, len(values))
    return values[0]


def _text(name: str, value: Value) -> str:
    if not isinstance(value, str | bytes):
        raise InvalidRequest(f"{name} must be a string")
    try:
        # JSON may contain an unpaired surrogate as an escape, which is not valid text.
        return (value.encode() if isinstance(value, str) else value).decode()
    except UnicodeError:
        raise NotUtf8(f"{name} is not UTF-8") from None


def _integer(name: str, value: Value) -> int:
    value = _parsed(name, value, int)
    if not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer")
    return value


def _number(name: str, value: Value) -> float:
    value = _parsed(name, value, float)
    if not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _parsed(name: str, value: Value, kind: type[N]) -> Value:
    if isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a number, not true or false")
    if not isinstance(value, str | bytes):
        return value
    try:
        return kind(_text(name, value))
    except ValueError:
        raise InvalidRequest(f"{name} must be a number") from None


def _boolean(name: str, value: Value) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false")
    return value


# setters


def _of_request(field: str, read: Callable[[str, Value], object]) -> Setter:
    def set_field(parsed: ParsedRequest, name: str, values: Values) -> None:
        setattr(parsed.generate, field, read(name, _one(name, values)))

    return set_field


def _counted(field: str) -> Setter:
    """Return a function that writes a number to the integer field ``field`` of a request.

    The function raises InvalidRequest unless there is exactly one value, which is an integer or
    its text. The function raises OutOfRange if the integer is outside the field's range.
    """

    def set_field(parsed: ParsedRequest, name: str, values: Values) -> None:
        value = _integer(name, _one(name, values))
        check_field(field, value, name)
        setattr(parsed.generate, field, value)

    return set_field


def _of_sampling(field: str, read: Callable[[str, Value], float]) -> Setter:
    def set_field(parsed: ParsedRequest, name: str, values: Values) -> None:
        value = read(name, _one(name, values))
        check_field(field, value, name)
        setattr(parsed.generate.sampling, field, value)

    return set_field


def _seed(parsed: ParsedRequest, name: str, values: Values) -> None:
    seed = _integer(name, _one(name, values))
    check_field("seed", seed, name)
    parsed.generate.sampling.seed = unsigned_seed(seed)


def _of_grammar(field: str) -> Setter:
    def set_field(parsed: ParsedRequest, name: str, values: Values) -> None:
        grammar = parsed.generate.sampling.grammar
        if (other := grammar.WhichOneof("form")) is not None:
            raise InvalidRequest(f"{name} cannot be combined with {other}")
        setattr(grammar, field, _text(name, _one(name, values)))

    return set_field


def _top_k(name: str, value: Value) -> int:
    top_k = _integer(name, value)
    return 0 if top_k == -1 else top_k


def _priority(name: str, value: Value) -> int:
    priority = _integer(name, value) or _MIDDLE_PRIORITY
    if not 1 <= priority <= _LOWEST_PRIORITY:
        raise OutOfRange(
            f"{name} must be from 1 (the highest) to {_LOWEST_PRIORITY}, or 0 for the default"
        )
    return _MIDDLE_PRIORITY - priority


def _timeout(parsed: ParsedRequest, name: str, values: Values) -> None:
    """Set the request's timeout from a number of microseconds; 0 means no timeout."""
    microseconds = _integer(name, _one(name, values))
    _MICROSECONDS.check(name, microseconds)
    if microseconds:
        # Round up to milliseconds.
        parsed.generate.timeout_ms = -(-microseconds // 1000)


def _texts(field: str) -> Setter:
    """Return a function that appends texts to the list ``field`` of a request.

    The function skips empty texts, and raises InvalidRequest if a value is not a string or not
    UTF-8.
    """

    def add(parsed: ParsedRequest, name: str, values: Values) -> None:
        texts = (_text(name, value) for value in values)
        getattr(parsed.generate, field).extend(text for text in texts if text)

    return add


def _stop_token_ids(parsed: ParsedRequest, name: str, values: Values) -> None:
    tokens = [_integer(name, value) for value in values]
    for token in tokens:
        check_field("stop_token_ids", token, name)
    parsed.generate.stop_token_ids.extend(tokens)


def _log_probs(parsed: ParsedRequest, name: str, values: Values) -> None:
    if _boolean(name, _one(name, values)):
        request_logprobs(parsed.generate)


def request_logprobs(message: wire.GenerateRequest) -> None:
    """Request log probabilities of the output tokens, unless they are requested already."""
    if not message.sampling.HasField("logprobs"):
        message.sampling.logprobs = 0


def _streamed(parsed: ParsedRequest, name: str, values: Values) -> None:
    parsed.is_streamed = _boolean(name, _one(name, values))


def _empty_final(parsed: ParsedRequest, name: str, values: Values) -> None:
    parsed.has_empty_final = _boolean(name, _one(name, values))


def _without_input(parsed: ParsedRequest, name: str, values: Values) -> None:
    if not _boolean(name, _one(name, values)):
        raise InvalidRequest(f"{name} must be true: text_output never includes the prompt")


def _always(parsed: ParsedRequest, name: str, values: Values) -> None:
    _boolean(name, _one(name, values))


PARAMETERS = (
    Parameter(("request_id",), "BYTES", 1, _of_request("request_id", _text)),
    Parameter(("max_tokens",), "INT32", 1, _counted("max_tokens")),
    Parameter(("truncate_prompt_tokens",), "INT32", 1, _counted("truncate_prompt_tokens")),
    Parameter(("min_tokens", "min_length"), "INT32", 1, _of_sampling("min_tokens", _integer)),
    Parameter(("temperature",), "FP32", 1, _of_sampling("temperature", _number)),
    Parameter(("top_k",), "INT32", 1, _of_sampling("top_k", _top_k)),
    Parameter(("top_p",), "FP32", 1, _of_sampling("top_p", _number)),
    Parameter(("min_p",), "FP32", 1, _of_sampling("min_p", _number)),
    Parameter(("repetition_penalty",), "FP32", 1, _of_sampling("repetition_penalty", _number)),
    Parameter(("presence_penalty",), "FP32", 1, _of_sampling("presence_penalty", _number)),
    Parameter(("frequency_penalty",), "FP32", 1, _of_sampling("frequency_penalty", _number)),
    Parameter(("seed", "random_seed"), "UINT64", 1, _seed),
    Parameter(("stop", "stop_words"), "BYTES", MAX_STOP_STRINGS, _texts("stop")),
    Parameter(("stop_token_ids",), "INT32", MAX_STOP_TOKEN_IDS, _stop_token_ids),
    Parameter(
        ("include_stop", "include_stop_str_in_output"),
        "BOOL",
        1,
        _of_request("include_stop", _boolean),
    ),
    Parameter(("bad_words",), "BYTES", MAX_BAD_WORDS, _texts("bad_words")),
    Parameter(("ignore_eos",), "BOOL", 1, _of_request("ignore_eos", _boolean)),
    Parameter(("n",), "INT32", 1, _counted("n")),
    Parameter(("best_of",), "INT32", 1, _counted("best_of")),
    Parameter(("json_schema",), "BYTES", 1, _of_grammar("json_schema")),
    Parameter(("regex",), "BYTES", 1, _of_grammar("regex")),
    Parameter(("ebnf",), "BYTES", 1, _of_grammar("ebnf")),
    Parameter(("cache_salt",), "BYTES", 1, _of_request("cache_salt", _text)),
    Parameter(("priority",), "UINT64", 1, _of_request("priority", _priority)),
    Parameter(("timeout",), "INT64", 1, _timeout),
    Parameter(("logprobs",), "INT32", 1, _of_sampling("logprobs", _integer)),
    Parameter(("return_logprobs", "return_log_probs"), "BOOL", 1, _log_probs),
    Parameter(("return_finish_reason",), "BOOL", 1, _always),
    Parameter(("return_num_input_tokens",), "BOOL", 1, _always),
    Parameter(("return_num_output_tokens",), "BOOL", 1, _always),
    Parameter(("exclude_input_in_output",), "BOOL", 1, _without_input),
    Parameter(("stream", "streaming"), "BOOL", 1, _streamed),
    Parameter(("triton_enable_empty_final_response",), "BOOL", 1, _empty_final),
)
_BY_NAME: Mapping[str, Parameter] = {
    name: parameter for parameter in PARAMETERS for name in parameter.names
}
#: Maximum number of request parameters: that of all names.
MAX_PARAMETERS = len(_BY_NAME) + 1
