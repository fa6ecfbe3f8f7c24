"""Conversion of a body's fields into submissions. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from everlift.checks import limit_plus_one
from everlift.errors import InvalidRequest, OutOfRange, TooManyRequests, Unsupported
from everlift.messages import (
    MAX_BAD_WORDS,
    MAX_LABEL_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Submission,
)
from everlift.sampling import MAX_ALLOWED_TOKENS, MAX_CHOICES, Grammar, unsigned_seed
from everlift.v1 import inference_pb2 as pb
from router.api.openai.fields import (
    MAX_PROMPTS,
    ChatFields,
    CompletionFields,
    Generation,
    ResponseFormat,
    StructuredOutputs,
)
from router.config import SessionField

#: Default of max_tokens in OpenAI's completions API.
_COMPLETION_TOKENS = 16
#: Maximum number of log probabilities, including alternatives, in an answer that is not streamed.
#: The router holds the whole answer in memory: in a chat, each log probability takes 60 bytes of
#: JSON in addition to the value itself.
_MAX_UNSTREAMED_LOGPROBS = 1 << 20
#: Maximum number of log probabilities of one prompt, including alternatives, in a stream. One event
#: has all of them, which delays all other streams while it is encoded.
_MAX_STREAMED_PROMPT_LOGPROBS = 1 << 15
#: Maximum number of log probabilities, including alternatives, of a response. Each takes 60 bytes
#: or more in several of its events, each of which is encoded at once.
_MAX_RESPONSE_LOGPROBS = 1 << 17
#: Maximum number of token ids of prompts in an answer with several choices, each of which has its
#: prompt's ids.
_MAX_RETURNED_IDS = 1 << 22


def of_completion(fields: CompletionFields) -> list[pb.GenerateRequest]:
    """Return a request for each prompt.

    Each request is for at least one output token: a ``max_tokens`` of 0 becomes 1, and
    ``Transcript`` hides this token from the client. Raises TooManyRequests if there are too many
    prompts, and InvalidRequest, OutOfRange or Unsupported if a field is invalid.
    """
    prompts = fields.prompts
    if len(prompts) > MAX_PROMPTS:
        raise TooManyRequests(
            f"the body has {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed",
            field="prompt",
        )
    if fields.suffix:
        raise Unsupported(
            "suffix is not supported: models are not trained to fill in the middle",
            field="suffix",
        )
    if fields.echo and fields.truncate_prompt_tokens is not None:
        raise Unsupported("echo cannot be combined with truncate_prompt_tokens", field="echo")
    message = _message(fields)
    if fields.max_tokens == 0:
        if fields.min_tokens:
            raise OutOfRange("min_tokens must be 0 if max_tokens is 0", field="min_tokens")
        message.max_tokens = 1
    if fields.max_tokens is None:
        message.max_tokens, message.clamp_max_tokens = _COMPLETION_TOKENS, True
    message.best_of = fields.best_of or 0
    if fields.logprobs is not None:
        if fields.max_tokens != 0:
            message.sampling.logprobs = fields.logprobs
        if fields.echo:
            num_top = max(fields.logprobs, fields.prompt_logprobs or 0)
            message.sampling.prompt_logprobs = num_top
    if len(prompts) > 1:
        # Fields that are too long must not be copied for each prompt.
        Submission.from_proto(_prompted(message, "a"), "a", seed=0)
    return [_prompted(message, prompt) for prompt in prompts]


def _prompted(message: pb.GenerateRequest, prompt: str | list[int]) -> pb.GenerateRequest:
    prompted = pb.GenerateRequest()
    prompted.CopyFrom(message)
    if isinstance(prompt, str):
        prompted.text = prompt
    else:
        prompted.tokens.ids.extend(prompt)
    return prompted


def of_chat(fields: Generation, prompt: str, tools: Grammar | None) -> pb.GenerateRequest:
    """Return the request for a chat whose rendered conversation is ``prompt``.

    ``tools`` is the grammar of tool calls if the output must be a tool call, else None. This
    grammar replaces that of response_format. Raises InvalidRequest if a field is invalid.
    """
    message = _message(fields)
    if isinstance(fields, ChatFields):
        if fields.max_completion_tokens is not None:
            message.max_tokens = fields.max_completion_tokens
        if fields.top_logprobs is not None and not fields.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        if fields.logprobs:
            message.sampling.logprobs = fields.top_logprobs or 0
    if tools is not None:
        # Clients of OpenAI's API combine response_format with required calls.
        for name in fields.forms:
            if name != "response_format":
                raise InvalidRequest(
                    f"{name} cannot be combined with a tool_choice that requires a call",
                    field=name,
                )
        message.sampling.grammar.CopyFrom(tools.to_proto())
    message.text = prompt
    # A template writes the special tokens itself.
    message.add_special_tokens = fields.add_special_tokens is True
    return message


def session_id(fields: Generation, names: Sequence[SessionField]) -> str:
    """Return the value of the first of the fields ``names`` that is set; empty if none is.

    Raises OutOfRange if the value is too long.
    """
    for name in names:
        if value := getattr(fields, name):
            if len(value.encode()) > MAX_LABEL_BYTES:
                raise OutOfRange(f"{name} is longer than {MAX_LABEL_BYTES} bytes", field=name)
            return str(value)
    return ""


def check_streamed_size(messages: Sequence[pb.GenerateRequest]) -> None:
    """Check that no event of a streamed answer becomes too large.

    Prompts whose log probabilities are requested must have been tokenized before: only token ids
    are counted. Raises OutOfRange if one of these prompts has too many log probabilities.
    """
    for message in messages:
        num_logprobs = _num_prompt_logprobs(message)
        if num_logprobs > _MAX_STREAMED_PROMPT_LOGPROBS:
            raise OutOfRange(
                f"a stream has at most {_MAX_STREAMED_PROMPT_LOGPROBS} log probabilities of a "
                f"prompt, including alternatives, and this prompt has {num_logprobs}: set stream "
                "to false, or request fewer alternatives",
                field="prompt_logprobs",
            )


def check_unstreamed_size(messages: Sequence[pb.GenerateRequest], context: int) -> None:
    """Check that an answer that is not streamed does not become too large.

    Prompts whose log probabilities are requested must have been tokenized before: only token ids
    are counted. Raises OutOfRange if the answer could contain too many log probabilities.
    ``context`` is the maximum length of a sequence in tokens.
    """
    num_logprobs = sum(_num_logprobs(message, context) for message in messages)
    if num_logprobs > _MAX_UNSTREAMED_LOGPROBS:
        has_output = any(message.sampling.HasField("logprobs") for message in messages)
        field = "logprobs" if has_output else "prompt_logprobs"
        raise OutOfRange(
            f"an answer that is not streamed has at most {_MAX_UNSTREAMED_LOGPROBS} log "
            f"probabilities, including alternatives; this one could have {num_logprobs}: "
            "set stream to true, send fewer prompts, or reduce max_tokens or n",
            field=field,
        )


def check_response_size(message: pb.GenerateRequest, context: int) -> None:
    """Check that no event of a response becomes too large.

    An event may contain the whole content of the response. Raises OutOfRange if the response could
    contain too many log probabilities. ``context`` is the maximum length of a sequence in tokens.
    """
    num_logprobs = _num_logprobs(message, context)
    if num_logprobs > _MAX_RESPONSE_LOGPROBS:
        raise OutOfRange(
            f"a response has at most {_MAX_RESPONSE_LOGPROBS} log probabilities, including "
            f"alternatives; this one could have {num_logprobs}: reduce max_output_tokens or "
            "top_logprobs",
            field="logprobs",
        )


def _num_prompt_logprobs(message: pb.GenerateRequest) -> int:
    if not message.sampling.HasField("prompt_logprobs"):
        return 0
    return len(message.tokens.ids) * (1 + message.sampling.prompt_logprobs)


def check_returned_ids(messages: Sequence[pb.GenerateRequest]) -> None:
    """Check that the prompts' token ids do not make the answer too large.

    Each choice repeats the ids of its prompt. Only prompts with several choices are counted. A text
    counts its number of bytes, because it has at most as many tokens. Raises OutOfRange if the
    answer could contain too many ids.
    """
    num_ids = sum(
        message.n * max(len(message.tokens.ids), len(message.text.encode()))
        for message in messages
        if message.n > 1
    )
    if num_ids > _MAX_RETURNED_IDS:
        raise OutOfRange(
            f"the token ids of the prompts of all choices could be {num_ids}; at most "
            f"{_MAX_RETURNED_IDS} are returned: reduce n",
            field="return_token_ids",
        )


def _num_logprobs(message: pb.GenerateRequest, context: int) -> int:
    """Return the maximum number of log probabilities in the answer, including alternatives."""
    num_logprobs = message.n * _num_prompt_logprobs(message)
    if not message.sampling.HasField("logprobs"):
        return num_logprobs
    is_truncated = message.HasField("truncate_prompt_tokens")
    max_output = context if is_truncated else max(0, context - len(message.tokens.ids))
    num_tokens = (
        min(max_output, message.max_tokens) if message.HasField("max_tokens") else max_output
    )
    return num_logprobs + message.n * num_tokens * (1 + message.sampling.logprobs)


def _message(fields: Generation) -> pb.GenerateRequest:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
    if fields.prompt_logprobs is not None and fields.truncate_prompt_tokens is not None:
        raise Unsupported(
            "prompt_logprobs cannot be combined with truncate_prompt_tokens",
            field="prompt_logprobs",
        )
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    return pb.GenerateRequest(
        model=fields.model or "",
        max_tokens=fields.max_tokens,
        n=fields.n or 1,
        sampling=_sampling(fields),
        stop=limit_plus_one(stop or (), MAX_STOP_STRINGS),
        stop_token_ids=limit_plus_one(fields.stop_token_ids or (), MAX_STOP_TOKEN_IDS),
        ignore_eos=fields.ignore_eos or False,
        bad_words=limit_plus_one(fields.bad_words or (), MAX_BAD_WORDS),
        include_stop=fields.include_stop_str_in_output or False,
        keep_special_tokens=fields.skip_special_tokens is False,
        add_special_tokens=fields.add_special_tokens,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        cache_salt=fields.cache_salt or "",
        priority=fields.priority or 0,
        timeout_ms=fields.timeout_ms,
        ttft_target_ms=fields.ttft_target_ms,
        on_disconnect=f"ON_DISCONNECT_{(fields.on_disconnect or 'cancel').upper()}",  # type: ignore[arg-type]
    )


def _sampling(fields: Generation) -> pb.Sampling:
    return pb.Sampling(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=0 if fields.top_k == -1 else fields.top_k,
        min_p=fields.min_p,
        seed=None if fields.seed is None else unsigned_seed(fields.seed),
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=_logit_bias(fields.logit_bias or {}),
        allowed_token_ids=limit_plus_one(fields.allowed_token_ids or (), MAX_ALLOWED_TOKENS),
        min_tokens=fields.min_tokens or 0,
        prompt_logprobs=fields.prompt_logprobs,
        grammar=_grammar(fields),
    )


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """Return ``bias`` with integer keys. Raises InvalidRequest if a key is not a token id."""
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) < 1 << 32):
            raise InvalidRequest("a key of logit_bias is not a token id", field="logit_bias")
    return {int(token): value for token, value in bias.items()}


def _grammar(fields: Generation) -> pb.Grammar | None:
    forms = {
        "response_format": _format(fields.response_format) if fields.response_format else None,
        "structured_outputs": (
            _structured(fields.structured_outputs) if fields.structured_outputs else None
        ),
        "json_schema": None if fields.json_schema is None else _schema(fields.json_schema),
        "regex": None if fields.regex is None else pb.Grammar(regex=fields.regex),
        "ebnf": None if fields.ebnf is None else pb.Grammar(ebnf=fields.ebnf),
    }
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidRequest(f"{first} and {second} cannot be combined", field=second)
    return next(iter(given.values()), None)


def _format(form: ResponseFormat) -> pb.Grammar | None:
    match form.type:
        case "text":
            return None
        case "json_object":
            return pb.Grammar(json_schema='{"type":"object"}')
        case "json_schema":
            if form.json_schema is None or form.json_schema.schema_ is None:
                raise InvalidRequest(
                    "response_format.json_schema.schema is missing",
                    field="response_format.json_schema.schema",
                )
            return _schema(form.json_schema.schema_)


def _structured(form: StructuredOutputs) -> pb.Grammar:
    given: dict[str, Any] = form.model_dump(exclude_none=True)
    if len(given) != 1:
        raise InvalidRequest(
            "structured_outputs must have exactly one of json, regex, grammar and choice",
            field="structured_outputs",
        )
    if form.regex is not None:
        return pb.Grammar(regex=form.regex)
    if form.grammar is not None:
        return pb.Grammar(ebnf=form.grammar)
    if form.choice is not None:
        return pb.Grammar(choice=pb.Choices(texts=limit_plus_one(form.choice, MAX_CHOICES)))
    assert form.json_ is not None
    return _schema(form.json_)


def _schema(schema: dict[str, Any] | str) -> pb.Grammar:
    if not isinstance(schema, str):
        # An escaped character has six bytes, and the size of a grammar is limited.
        schema = json.dumps(schema, ensure_ascii=False)
    return pb.Grammar(json_schema=schema)
