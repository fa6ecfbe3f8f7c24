"""Fields of ``/v1/messages`` and ``/v1/messages/count_tokens``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from router.api.http.fields import Fields, InRange, List, Object, SharedFields
from router.api.openai.fields import Generation, JsonSchema, ResponseFormat


class Thinking(Fields):
    """Switch for reasoning before the answer; chat templates without such a switch ignore it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]

    # Accepted, but without effect.
    budget_tokens: int | None = None
    display: Any = None


class Metadata(Fields):
    user_id: str | None = None


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Fields):
    format: OutputFormat | None = None

    # Accepted, but without effect.
    effort: Any = None


class CountTokensFields(Fields):
    """Fields that make up the prompt."""

    model: str
    messages: List[Object] = Field(min_length=1)
    system: str | List[Object] | None = None
    tools: List[Object] | None = None
    tool_choice: Object | None = None
    thinking: Thinking | None = None

    #: like one in the last block
    cache_control: Object | None = None
    output_config: OutputConfig | None = None

    # Accepted, but without effect.
    context_management: Any = Field(None, description="accepted and ignored: nothing is cleared")
    speed: Any = None
    user_profile_id: Any = None

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "container": "there is no code execution",
        "mcp_servers": "the server calls no tools itself",
    }


class MessagesFields(CountTokensFields, SharedFields):
    model: str
    max_tokens: Annotated[int, InRange("max_tokens")]
    metadata: Metadata | None = None
    stop_sequences: List[str] | None = None

    # Accepted, but without effect.
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None

    PARAMS: ClassVar[Mapping[str, str]] = {
        "request_id": "idempotency-key",
        "stop": "stop_sequences",
        "grammar": "output_config.format",
        **dict.fromkeys(("prompt", "text", "tokens", "images"), "messages"),
    }

    @property
    def generation(self) -> Generation:
        """Return the parameters of the generation in the form that all APIs share."""
        form = self.output_config.format if self.output_config else None
        return Generation(
            **self.shared,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            response_format=_response_format(form) if form else None,
            user=self.metadata.user_id if self.metadata else None,
        )


def _response_format(form: OutputFormat) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema_))
