"""Fields of ``/v1/responses``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from router.api.openai.fields import (
    Fields,
    Generation,
    InRange,
    JsonSchema,
    List,
    Object,
    ResponseFormat,
    StreamOptions,
)

#: Values of ``include`` that change nothing, because the answer has no such data.
_INCLUDABLE = Literal["reasoning.encrypted_content"]
_NO_STORE = "the server keeps no such objects"


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(Fields):
    format: TextFormat | None = None

    # Accepted, but without effect.
    verbosity: Any = None


class Reasoning(Fields):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="variable reasoning_effort of the chat template; none: no reasoning"
    )

    # Accepted, but without effect.
    context: Any = None
    generate_summary: Any = None
    mode: Any = None
    summary: Any = None


class ConversationId(Fields):
    id: str


class InputTokensFields(Fields):
    """Fields that make up the prompt."""

    model: str | None = None
    input: str | List[Object] = Field(description="a text, or a list of items")
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = Field(
        None, description="conversation to continue; not together with previous_response_id"
    )
    reasoning: Reasoning | None = None
    tools: List[Object] | None = Field(
        None,
        description="functions; OpenAI's other tools, such as web_search, custom and namespace, "
        "are accepted and ignored: the model does not see them",
    )
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest turns if the context is too short"
    )
    text: Text | None = None

    @property
    def conversation_id(self) -> str | None:
        named = self.conversation
        return named.id if isinstance(named, ConversationId) else named


class ResponseFields(InputTokensFields):
    background: bool | None = Field(None, description="answer at once; poll or re-stream later")
    store: bool | None = Field(None, description="keep the response; default: true")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, InRange("max_tokens")] | None = None
    temperature: Annotated[float, InRange("temperature")] | None = None
    top_p: Annotated[float, InRange("top_p")] | None = None
    include: List[_INCLUDABLE] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)

    # These name the request's session, if router.session_from includes them.
    prompt_cache_key: str | None = None
    user: str | None = None

    # Everlift's additions, as in the other APIs.
    priority: Annotated[int, InRange("priority")] | None = None
    seed: Annotated[int, InRange("seed")] | None = None
    stop: str | List[str] | None = None
    timeout_ms: Annotated[int, InRange("timeout_ms")] | None = None
    ttft_target_ms: Annotated[int, InRange("ttft_target_ms")] | None = None
    top_k: Annotated[int, InRange("top_k")] | None = None
    min_p: Annotated[float, InRange("min_p")] | None = None
    repetition_penalty: Annotated[float, InRange("repetition_penalty")] | None = None
    cache_salt: str | None = None
    on_disconnect: Literal["cancel", "grace", "continue"] | None = None

    # Accepted, but without effect.
    client_metadata: Any = None
    max_tool_calls: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "context_management": "the client has to shorten the conversation",
        "moderation": "there is no moderation model",
        "prompt": _NO_STORE,
        "top_logprobs": "use chat completions for log probabilities",
    }
    PARAMS: ClassVar[Mapping[str, str]] = {
        "request_id": "idempotency-key",
        "max_tokens": "max_output_tokens",
        "grammar": "text.format",
        **dict.fromkeys(("prompt", "tokens"), "input"),
        "text": "input",
    }

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def generation(self) -> Generation:
        """Return the parameters of the generation in the form that all APIs share."""
        form = self.text.format if self.text else None
        return Generation(
            model=self.model,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            stream=self.stream,
            stream_options=self.stream_options,
            seed=self.seed,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout_ms=self.timeout_ms,
            ttft_target_ms=self.ttft_target_ms,
            on_disconnect="continue" if self.background else self.on_disconnect,
            response_format=_response_format(form) if form else None,
            prompt_cache_key=self.prompt_cache_key,
            user=self.user,
        )


def _response_format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    return ResponseFormat(type=form.type, json_schema=JsonSchema(schema=form.schema_))
