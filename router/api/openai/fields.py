"""Fields of request bodies: OpenAI's, and Everlift's additions. Pure.

The ranges of numbers are defined in everlift.messages for every protocol; other limits are checked
there. A list is checked up to its first invalid element, because pydantic creates an object for
each error and a body may have millions of errors. An error response names one field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import ErrorDetails, core_schema

from everlift.checks import Range
from everlift.errors import InvalidRequest, LogitBiasTooLarge, UnknownField, Unsupported
from everlift.messages import RANGES, check_field
from everlift.sampling import MAX_LOGIT_BIAS
from everlift.typos import did_you_mean

T = TypeVar("T")
N = TypeVar("N", int, float)
List = Annotated[list[T], Field(fail_fast=True)]
Ids = List[Annotated[int, Field(ge=0, le=2**32 - 1)]]
Object = dict[str, Any]

#: Maximum characters of a field's name in an error message.
_MAX_NAME = 64
#: Maximum prompts of one body, each of which becomes a request.
MAX_PROMPTS = 128


@dataclass(frozen=True, slots=True)
class InRange:
    """Annotation that limits a number to the range that everlift.messages has for ``field``.

    ``low`` replaces the lower limit of this range, unless it is None.
    """

    field: str
    low: int | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        valid = self._range
        least = "exclusiveMinimum" if valid.exclusive_low else "minimum"
        return {**handler(schema), least: valid.low, "maximum": valid.high}

    def _check(self, value: N, info: ValidationInfo) -> N:
        name = info.field_name or ""
        if self.low is None:
            check_field(self.field, value, name)
        else:
            self._range.check(name, value)
        return value

    @property
    def _range(self) -> Range:
        valid = RANGES[self.field]
        return valid if self.low is None else replace(valid, low=self.low)


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    #: client's names for fields of everlift.messages, for those that have another name in this body
    PARAMS: ClassVar[Mapping[str, str]] = {}

    #: fields of OpenAI's API that must be null or absent, with the reason
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all fields as they are written in a body."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @property
    def params(self) -> Mapping[str, str]:
        """Map names of fields in everlift.messages to the names in this body.

        Only names that differ are included.
        """
        return self.PARAMS

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Remove known fields that are null, because null means absent.

        Only one member more than there are known fields is read, because among so many members at
        least one is unknown and is reported as an error. Raises Unsupported if a field is set that
        the server does not support.
        """
        if not isinstance(data, dict):
            return data
        known = {*cls.names(), *cls.UNSUPPORTED}
        read = dict(islice(data.items(), len(known) + 1))
        for name, reason in cls.UNSUPPORTED.items():
            if read.get(name) is not None:
                raise Unsupported(f"{name} is not supported: {reason}", field=name)
        return {
            name: value for name, value in read.items() if value is not None or name not in known
        }


def _check_bias_size(bias: Any) -> Any:
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise LogitBiasTooLarge(
            f"logit_bias has {len(bias)} tokens; at most {MAX_LOGIT_BIAS} are allowed",
            field="logit_bias",
        )
    return bias


Bias = Annotated[dict[str, float], BeforeValidator(_check_bias_size)]
F = TypeVar("F", bound=Fields)


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="every chunk has the usage so far; takes effect with include_usage"
    )

    # Accepted, but without effect.
    include_obfuscation: bool | None = None

    @property
    def has_continuous_usage(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class JsonSchema(Fields):
    name: str | None = None
    description: str | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """Structured output as in vLLM; exactly one of the fields must be given."""

    json_: Object | str | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: List[str] | None = None


#: Fields of a generation that state the form of its output; a body may have one of them.
FORMS = ("response_format", "structured_outputs", "json_schema", "regex", "ebnf")


class SharedFields(Fields):
    """Fields that the requests of all APIs for text have under the same names."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, InRange("temperature")] | None = None
    top_p: Annotated[float, InRange("top_p")] | None = None
    seed: Annotated[int, InRange("seed")] | None = None

    # Everlift's additions, with vLLM's names where vLLM has the same field.
    top_k: Annotated[int, InRange("top_k")] | None = Field(None, description="0 or -1: no limit")
    min_p: Annotated[float, InRange("min_p")] | None = None
    repetition_penalty: Annotated[float, InRange("repetition_penalty")] | None = None
    priority: Annotated[int, InRange("priority")] | None = Field(
        None, description="a higher class leaves the queue first"
    )
    cache_salt: str | None = None
    timeout_ms: Annotated[int, InRange("timeout_ms")] | None = None
    ttft_target_ms: Annotated[int, InRange("ttft_target_ms")] | None = None
    on_disconnect: Literal["cancel", "grace", "continue"] | None = Field(
        None, description="behaviour of the request when its client disconnects"
    )

    @property
    def shared(self) -> dict[str, Any]:
        """Return the values of the shared fields by name."""
        return {name: getattr(self, name) for name in SharedFields.model_fields}


class Generation(SharedFields):
    """Common fields of completions and chat."""

    max_tokens: Annotated[int, InRange("max_tokens")] | None = None
    n: Annotated[int, InRange("n")] | None = None
    stream_options: StreamOptions | None = None
    stop: str | List[str] | None = None
    presence_penalty: Annotated[float, InRange("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, InRange("frequency_penalty")] | None = None
    logit_bias: Bias | None = None
    response_format: ResponseFormat | None = None

    # vLLM's additions.
    min_tokens: Annotated[int, InRange("min_tokens")] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: List[Annotated[int, InRange("stop_token_ids")]] | None = None
    prompt_logprobs: Annotated[int, InRange("prompt_logprobs")] | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: Annotated[
        bool | None, Field(description="false: the text includes special tokens")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Field(description="add special tokens to a text; default: true, for a chat false"),
    ] = None
    allowed_token_ids: Annotated[Ids | None, Field(min_length=1)] = None
    bad_words: List[str] | None = None
    return_token_ids: bool = False
    truncate_prompt_tokens: Annotated[
        int | None,
        InRange("truncate_prompt_tokens"),
        Field(description="use the last tokens of the prompt; -1: what the context leaves"),
    ] = None

    # SGLang's names for members of structured_outputs.
    json_schema: Object | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    # These name the request's session, if router.session_from includes them.
    prompt_cache_key: str | None = None
    user: str | None = None

    # Accepted, but without effect.
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "guided_choice": "use structured_outputs.choice",
        "guided_decoding_backend": "leave it out, because there is only one backend",
        "guided_grammar": "use structured_outputs.grammar",
        "guided_json": "use structured_outputs.json",
        "guided_regex": "use structured_outputs.regex",
        "guided_whitespace_pattern": "leave it out, because white space is fixed",
    }
    PARAMS: ClassVar[Mapping[str, str]] = {
        "request_id": "idempotency-key",
        "grammar": "response_format",
        "banned_sequences": "bad_words",
        "text": "prompt",
        "tokens": "prompt",
    }

    @property
    def forms(self) -> list[str]:
        """Return the names of the given fields that restrict the form of the output."""
        form = self.response_format
        is_any = form is None or form.type == "text"
        given = [name for name in FORMS if getattr(self, name) is not None]
        return [name for name in given if name != "response_format" or not is_any]

    @property
    def params(self) -> Mapping[str, str]:
        form = self.forms[:1]
        return {**self.PARAMS, "grammar": form[0]} if form else self.PARAMS


class CompletionFields(Generation):
    prompt: str | Ids | List[str] | List[Ids] = Field(
        description=f"a text, token ids, or up to {MAX_PROMPTS} of either"
    )
    max_tokens: Annotated[int, InRange("max_tokens", low=0)] | None = Field(
        None, description="0: the prompt is computed, and the completion has no tokens"
    )
    logprobs: Annotated[int, InRange("logprobs")] | None = None
    echo: bool | None = None
    best_of: Annotated[int, InRange("best_of")] | None = None
    suffix: str | None = None

    @property
    def params(self) -> Mapping[str, str]:
        if self.prompt_logprobs is None:
            return {**super().params, "prompt_logprobs": "logprobs"}
        return super().params

    @property
    def prompts(self) -> list[str | Ids]:
        """Return the prompts as a list, even if the body has a single prompt."""
        match self.prompt:
            case [str() | list(), *_]:
                return list(self.prompt)  # type: ignore[arg-type]
            case _:
                return [self.prompt]  # type: ignore[list-item]


#: Values of reasoning_effort, which only the chat template interprets.
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Chat(Fields):
    """Fields that a chat template reads."""

    messages: List[Object] | None
    tools: List[Object] | None = None
    documents: List[Object] | None = None
    chat_template: Annotated[
        str | None, Field(description="needs the setting router.allow_chat_template")
    ] = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = Field(
        None, description="default: true, unless continue_final_message is"
    )
    continue_final_message: bool | None = Field(
        None, description="the output continues the text of the last message"
    )


class ChatFields(Generation, Chat):
    messages: List[Object] = Field(min_length=1)
    max_completion_tokens: Annotated[int, InRange("max_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, InRange("logprobs")] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None

    # Accepted, but without effect.
    verbosity: Any = None
    prediction: Any = None
    modalities: List[Literal["text"]] | None = None

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **Generation.UNSUPPORTED,
        "audio": "models produce text only",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "moderation": "there is no moderation model",
        "web_search_options": "there is no web search",
    }
    PARAMS: ClassVar[Mapping[str, str]] = {
        **Generation.PARAMS,
        "logprobs": "top_logprobs",
        **dict.fromkeys(("prompt", "text", "tokens"), "messages"),
    }

    @property
    def params(self) -> Mapping[str, str]:
        if self.max_completion_tokens is None:
            return super().params
        return {**super().params, "max_tokens": "max_completion_tokens"}


class TokenizeFields(Chat):
    """Prompt or chat to tokenise."""

    model: str | None = None
    prompt: str | None = None
    messages: List[Object] | None = None
    add_special_tokens: bool | None = Field(
        None, description="add special tokens; default: true for a prompt, false for messages"
    )
    return_token_strs: bool = False

    PARAMS: ClassVar[Mapping[str, str]] = {"text": "prompt"}


class DetokenizeFields(Fields):
    model: str | None = None
    tokens: Ids

    PARAMS: ClassVar[Mapping[str, str]] = {"token_ids": "tokens"}


def parse(kind: type[F], body: Object) -> F:
    """Parse and check the fields of a body.

    Raises UnknownField, and InvalidRequest if a field is missing or invalid.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False), kind, body) from None


def _refusal(details: Sequence[ErrorDetails], kind: type[Fields], body: Object) -> InvalidRequest:
    """Return the error for the first invalid field.

    An unknown field is reported before others, because it may be a misspelt required field.
    """
    first = next((each for each in details if each["type"] == "extra_forbidden"), details[0])
    is_missing = first["type"] == "missing"
    where = _path(first["loc"][:-1] if is_missing else first["loc"], body)
    if first["type"] == "extra_forbidden":
        is_own = len(first["loc"]) == 1
        hint = did_you_mean(str(first["loc"][0]), kind.names()) if is_own else ""
        return UnknownField(f"unknown field {where!r}{hint}", field=where)
    if is_missing:
        where = f"{where}.{first['loc'][-1]}".removeprefix(".")
        return InvalidRequest(f"{where} is missing", field=where)
    # A field with alternative types has one error for each of them.
    causes = [each["msg"] for each in details if each["loc"][0] == first["loc"][0]]
    return InvalidRequest(f"{where}: {', or '.join(dict.fromkeys(causes))}", field=where)


def _path(location: Iterable[int | str], body: Any) -> str:
    """Return the path of an invalid field, such as ``messages[0].role``.

    ``location`` is the error's location as pydantic reports it. Parts of ``location`` that are not
    in ``body`` are names of alternatives in a union type, and are left out.
    """
    path = ""
    for part in location:
        try:
            body = body[part]
        except (LookupError, TypeError):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_NAME]}"
    return path.removeprefix(".")
