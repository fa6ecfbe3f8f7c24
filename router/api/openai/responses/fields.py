"""Fields of ``/v1/responses``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from everlift.errors import InvalidRequest
from router.api.http.fields import Fields, InRange, List, Object, SharedFields
from router.api.openai.fields import Generation, JsonSchema, ResponseFormat, StreamOptions

#: Value of ``include`` that requests the log probabilities of the content.
LOGPROBS = "message.output_text.logprobs"
#: Values of ``include``. Encrypted reasoning changes nothing, because the answer has none.
_INCLUDABLE = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=512)]],
    Field(max_length=16, description="up to 16 texts by name"),
]


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
    input: str | List[Object] = Field(description="a string, or a list of items")
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = Field(
        None, description="conversation to continue; not together with previous_response_id"
    )
    reasoning: Reasoning | None = None
    tools: List[Object] | None = Field(
        None,
        description="functions, also in namespaces; OpenAI's other tools, such as web_search and "
        "custom, are accepted and ignored: the model does not see them",
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


class ResponseFields(InputTokensFields, SharedFields):
    background: bool | None = Field(
        None,
        description="answer before the response is complete; the client polls or streams it later",
    )
    store: bool | None = Field(None, description="keep the response; default: true")
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, InRange("max_tokens")] | None = None
    include: List[_INCLUDABLE] | None = None
    top_logprobs: Annotated[int, InRange("logprobs")] | None = Field(
        None, description=f"alternatives of each token; needs {LOGPROBS} in include"
    )
    metadata: Metadata | None = None
    stop: str | List[str] | None = Field(
        None, description="texts that end the output; not in OpenAI's API"
    )

    # These name the request's session, if router.session_from includes them.
    prompt_cache_key: str | None = None
    user: str | None = None

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
        "prompt": "the server keeps no prompts",
    }
    PARAMS: ClassVar[Mapping[str, str]] = {
        "request_id": "idempotency-key",
        "max_tokens": "max_output_tokens",
        "grammar": "text.format",
        "logprobs": "top_logprobs",
        **dict.fromkeys(("prompt", "tokens", "images"), "input"),
        "text": "input",
    }

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of alternatives of each token; None without log probabilities.

        Raises InvalidRequest if alternatives are requested without log probabilities.
        """
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest(f"top_logprobs needs {LOGPROBS} in include", field="top_logprobs")
        return None

    @property
    def generation(self) -> Generation:
        """Return the parameters of the generation in the form that all APIs share.

        Raises InvalidRequest if ``text.format`` is of the type json_schema but has no schema.
        """
        form = self.text.format if self.text else None
        shared = self.shared | ({"on_disconnect": "continue"} if self.background else {})
        return Generation(
            **shared,
            max_tokens=self.max_output_tokens,
            stop=self.stop,
            stream_options=self.stream_options,
            response_format=_response_format(form) if form else None,
            prompt_cache_key=self.prompt_cache_key,
            user=self.user,
        )


def _response_format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.schema_ is None:
        raise InvalidRequest("text.format.schema is missing", field="text.format.schema")
    return ResponseFormat(type=form.type, json_schema=JsonSchema(schema=form.schema_))
