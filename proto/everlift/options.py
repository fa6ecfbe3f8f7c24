"""Options of a request, and their conversion to a protobuf message."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from everlift.checks import Range, sendable
from everlift.errors import InvalidRequest
from everlift.messages import MAX_TIMEOUT_S, RANGES, OnDisconnect, check_field
from everlift.request_id import check_request_id, in_session
from everlift.sampling import unsigned_seed
from everlift.v1 import inference_pb2 as pb

_SECONDS = Range(0.001, MAX_TIMEOUT_S)
_STRINGS = ("cache_salt", "model", "session_id")
#: Prompt as a text or as token ids.
Prompt: TypeAlias = str | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """Options of a request.

    An option that is missing, or None if its type allows None, has its default value. The defaults
    of temperature, top_p, top_k, min_p and repetition_penalty are those of the served model, which
    the client's method ``models`` returns. The comments below give the default of each parameter
    that the model does not define.
    """

    #: maximum number of tokens to generate; default: the number that the prompt leaves in the
    #: context
    max_tokens: int | None
    #: lower max_tokens to the number that the prompt leaves in the context, instead of rejecting
    #: the request
    clamp_max_tokens: bool
    #: use only the last tokens of the prompt, at most this number; -1: the number that max_tokens
    #: leaves in the context; default: reject a prompt that is too long
    truncate_prompt_tokens: int | None
    #: files of images in the order of their placeholders in the prompt, in PNG, JPEG, WebP or GIF
    #: format
    images: Sequence[bytes]
    #: 0 is greedy; default 1
    temperature: float | None
    #: sample from the fewest most likely tokens whose probabilities add up to this; default 1
    top_p: float | None
    #: sample from this number of most likely tokens; default 0: no limit
    top_k: int | None
    #: minimum probability of a token, relative to that of the most likely token; default 0
    min_p: float | None
    #: seed of the random numbers; the same seed gives the same random numbers
    seed: int | None
    #: number of choices, which are separate outputs of the same prompt; default 1
    n: int | None
    #: divisor of the positive logits, and factor of the negative logits, of tokens that occurred in
    #: the prompt or the output; default 1
    repetition_penalty: float | None
    #: subtracted from the logits of tokens that occurred in the output; default 0
    presence_penalty: float | None
    #: subtracted from the logit of a token for each of its occurrences in the output; default 0
    frequency_penalty: float | None
    #: numbers that are added to the logits of tokens, by token id
    logit_bias: Mapping[int, float] | None
    #: the only tokens that are sampled; default: all
    allowed_token_ids: Sequence[int] | None
    #: texts whose tokens the output does not contain, with and without a space before them
    bad_words: str | Sequence[str] | None
    #: number of tokens before which stop tokens and stop strings have no effect; default 0
    min_tokens: int | None
    #: report each token's log probability, and this number of most likely tokens at its position
    logprobs: int | None
    #: the same as logprobs, for each token of the prompt except the first
    prompt_logprobs: int | None
    #: the output is JSON of this schema; at most one of json_schema, regex, ebnf and choice may be
    #: given
    json_schema: str | Mapping[str, Any] | None
    #: the output matches this regular expression
    regex: str | None
    #: the output follows this GBNF grammar, whose start rule is called "root"
    ebnf: str | None
    #: the output is one of these texts
    choice: str | Sequence[str] | None
    #: the text ends before the first occurrence of one of these strings
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    #: the text ends after the stop string or stop token instead of before it
    include_stop: bool
    #: class of the request, from -10 to 10; a higher class leaves the queue first; default 0
    priority: int
    #: target for the time from the request's arrival to its first token, in seconds
    ttft_target_s: float
    #: continue after an end-of-sequence token
    ignore_eos: bool
    #: share cached KV blocks only with requests of the same salt
    cache_salt: str
    #: name of the conversation to which the request belongs
    session_id: str
    #: name of the model; default: the model that the cluster serves
    model: str
    #: include the request's time in each phase, such as queue and decode, in the stream's timing
    explain: bool
    #: idempotency key: submitting the same request again under its id does not create another one
    request_id: str | None
    #: default GRACE: the router keeps the request for a grace period, so that its client can return
    on_disconnect: OnDisconnect
    #: seconds after the first call of the request at which it fails with DeadlineExceeded
    timeout_s: float | None


def submission_message(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Return the message that submits ``prompt`` with ``options`` to a router.

    Raises TypeError for an unknown option or a prompt of bytes. Raises InvalidRequest for an
    invalid request id, a number out of range, several grammars, or a value that the message cannot
    hold. Other invalid values, such as an empty prompt, are left to the router.
    """
    for name in options.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"generate() has no option {name!r}")
    if isinstance(prompt, bytes):
        raise TypeError("a prompt must be a string or token ids, not bytes")
    _check_values(options)
    with sendable():
        message = _message_without_prompt(options)
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.tokens.ids.extend(prompt)
    return message


def request_id_of(options: GenerateOptions) -> str:
    """Return the request id in ``options``, or a new one for their session.

    Raises InvalidRequest for a ``session_id`` that is no text, or that UTF-8 cannot encode.
    """
    session_id = options.get("session_id") or ""
    _check_string("session_id", session_id)
    with sendable():
        return options.get("request_id") or in_session(uuid.uuid4().hex, session_id)


def _check_values(options: GenerateOptions) -> None:
    for name, value in options.items():
        if value is None:
            continue
        if name == "stop_token_ids":
            for token in options["stop_token_ids"]:
                check_field(name, token)
        elif name in RANGES:
            check_field(name, value)  # type: ignore[arg-type]
        elif name in ("timeout_s", "ttft_target_s"):
            _SECONDS.check(name, value)  # type: ignore[arg-type]
        elif name in _STRINGS:
            _check_string(name, value)


def _check_string(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string", field=name)


def _message_without_prompt(options: GenerateOptions) -> pb.GenerateRequest:
    stop, timeout_s = options.get("stop", ()), options.get("timeout_s")
    on_disconnect = options.get("on_disconnect", OnDisconnect.GRACE)
    ttft_target_s = options.get("ttft_target_s")
    return pb.GenerateRequest(
        request_id=check_request_id(request_id_of(options)),
        session_id=options.get("session_id", ""),
        model=options.get("model", ""),
        max_tokens=options.get("max_tokens"),
        clamp_max_tokens=options.get("clamp_max_tokens", False),
        truncate_prompt_tokens=options.get("truncate_prompt_tokens"),
        images=options.get("images", ()),
        n=options.get("n"),
        sampling=_sampling(options),
        include_stop=options.get("include_stop", False),
        cache_salt=options.get("cache_salt", ""),
        stop=_as_list(stop),
        stop_token_ids=options.get("stop_token_ids", ()),
        ignore_eos=options.get("ignore_eos", False),
        bad_words=_as_list(options.get("bad_words") or ()),
        on_disconnect=on_disconnect.value,
        timeout_ms=None if timeout_s is None else round(timeout_s * 1e3),
        priority=options.get("priority", 0),
        explain=options.get("explain", False),
        ttft_target_ms=None if ttft_target_s is None else round(ttft_target_s * 1e3),
    )


def _as_list(texts: str | Sequence[str]) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts


def _sampling(options: GenerateOptions) -> pb.Sampling:
    seed = options.get("seed")
    return pb.Sampling(
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        top_k=options.get("top_k"),
        min_p=options.get("min_p"),
        seed=None if seed is None else unsigned_seed(seed),
        repetition_penalty=options.get("repetition_penalty"),
        presence_penalty=options.get("presence_penalty"),
        frequency_penalty=options.get("frequency_penalty"),
        logit_bias=options.get("logit_bias"),
        allowed_token_ids=options.get("allowed_token_ids"),
        min_tokens=options.get("min_tokens") or 0,
        logprobs=options.get("logprobs"),
        prompt_logprobs=options.get("prompt_logprobs"),
        grammar=_grammar(options),
    )


def _grammar(options: GenerateOptions) -> pb.Grammar | None:
    schema, texts = options.get("json_schema"), options.get("choice")
    forms = {
        "json_schema": json.dumps(schema) if isinstance(schema, Mapping) else schema,
        "regex": options.get("regex"),
        "ebnf": options.get("ebnf"),
        "choice": None if texts is None else pb.Choices(texts=_as_list(texts)),
    }
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        raise InvalidRequest(f"only one of {' and '.join(given)} can be given")
    return pb.Grammar(**given) if given else None  # type: ignore[arg-type]
