"""Fields of ``/v1/batches`` and ``/v1/files``. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.api.http.fields import Fields
from router.api.openai.responses.fields import Metadata

#: Range of the time after which a file expires, in seconds, as in OpenAI's API.
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86400
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]


class ExpiresAfter(Fields):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class BatchFields(Fields):
    input_file_id: str
    endpoint: Endpoint
    completion_window: str = Field(description="for example 24h, 30m or 7d; at most 7d")
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = Field(
        None, description="time for which the files with the results are kept"
    )
