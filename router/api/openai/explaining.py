"""Handler of ``/v1/requests/{request_id}/explanation``: times of a request by phase."""

from __future__ import annotations

from typing import NotRequired, cast

from starlette.responses import Response
from typing_extensions import TypedDict

from everlift.explanation import as_json
from everlift.v1 import inference_pb2 as pb
from router.api.http.endpoint import Call, JsonResponse
from router.api.service import Inference


class SpanBody(TypedDict):
    kind: str
    start_s: float
    seconds: float
    attempt: int


class QueueBypassBody(TypedDict):
    found: int
    earlier: int
    higher: int
    fair_share: int
    ordered: int
    lower: int
    before: list[str]
    order: str


class AttemptBody(TypedDict):
    number: int
    worker_id: str
    known_tokens: int
    cached_tokens: int
    new_tokens: int
    preemptions: int
    recomputed_tokens: int
    end: str
    steps: int
    most_neighbours: int
    neighbours: list[str]
    newcomers: list[str]
    occupants: list[str]
    queue: NotRequired[QueueBypassBody]


class ExplanationBody(TypedDict):
    request_id: str
    state: str
    total_s: float
    spans: list[SpanBody]
    attempts: list[AttemptBody]
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: int
    prediction_distrusted: bool
    ttft_s: NotRequired[float]
    ledger_s: NotRequired[float]
    predicted_ttft_s: NotRequired[float]
    dropped_attempts: int
    unread_s: float
    unread_tokens: int
    bypassed: int


class Explaining:
    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def explain(self, call: Call) -> Response:
        message = pb.ExplainRequest(request_id=call.request.path_params["request_id"])
        explanation = await self._inference.explain(call.caller, message)
        return JsonResponse(cast("ExplanationBody", as_json(explanation)))
