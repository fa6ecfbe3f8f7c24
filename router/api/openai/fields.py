"""Fields of completions, chats and tokenisation: OpenAI's, and additions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from everlift.errors import LogitBiasTooLarge
from everlift.sampling import MAX_LOGIT_BIAS
from router.api.http.fields import Fields, Ids, InRange, List, Object, SharedFields

#: Maximum prompts of one body, each of which becomes a request.
MAX_PROMPTS = 128


def _check_bias_size(bias: Any) -> Any:
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise LogitBiasTooLarge(
            f"logit_bias has {len(bias)} tokens; at most {MAX_LOGIT_BIAS} are allowed",
            field="logit_bias",
        )
    return bias


Bias = Annotated[dict[str, float], BeforeValidator(_check_bias_size)]


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="every chunk has the usage so far; only with include_usage"
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
        Field(description="keep only this many last tokens of the prompt; -1: as many as fit"),
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
        description=f"a string, token ids, or up to {MAX_PROMPTS} of either"
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
        None, description="default: true, or false with continue_final_message"
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
        **dict.fromkeys(("prompt", "text", "tokens", "images"), "messages"),
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


class LoadAdapterFields(Fields):
    """Name of a LoRA adapter, and the directory or hub id of its files."""

    lora_name: str
    lora_path: str
    model: str | None = Field(None, description="model of the adapter; default: the first one")

    PARAMS: ClassVar[Mapping[str, str]] = {"name": "lora_name", "source": "lora_path"}


class UnloadAdapterFields(Fields):
    lora_name: str

    PARAMS: ClassVar[Mapping[str, str]] = {"name": "lora_name"}
