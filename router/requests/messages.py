"""Messages to workers about a request, and descriptions of requests for the leader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from everlift.hashes import CHUNK_SIZE
from everlift.messages import Request
from everlift.sampling import SamplingParams
from everlift.v1 import session_pb2
from router.admission.request import Running, Waiting
from router.prediction.predictor import Prediction
from router.requests.request import Choice, LiveRequest


def start(
    live: LiveRequest, choice: Choice, prefix: Sequence[bytes] = (), *, has_images: bool = True
) -> session_pb2.Start:
    """Return the message that makes a worker start a choice, or resume it after earlier output.

    ``prefix`` has the hashes of the leading chunks that the worker is expected to have in its
    prefix cache. The tokens of these chunks are left out. If ``has_images`` is false, the message
    has only the digests of the images, because another message of the attempt has their files.
    """
    request = live.request
    num_omitted = len(prefix) * CHUNK_SIZE
    num_prompt = min(num_omitted, len(request.prompt_ids))
    num_output = num_omitted - num_prompt
    message = first_start(
        request,
        live.epoch,
        choice.index,
        _prompt_ids(request, num_prompt),
        _sampling(live, choice),
        has_images=has_images,
    )
    message.output_ids.extend(choice.output.tokens[num_output:])
    message.num_computed = _num_computed(live, choice)
    message.predicted_tokens = live.prediction.length.expected_remaining(0, request.max_tokens)
    message.confirm_first_step = live.confirms_first_step
    if prefix:
        message.expected_cached_tokens = live.expected_cached_tokens
        message.omitted_prefix.hash = prefix[-1]
        message.omitted_prefix.num_prompt = num_prompt
        message.omitted_prefix.num_output = num_output
    return message


def first_start(
    request: Request,
    epoch: int,
    choice: int,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    has_images: bool = True,
) -> session_pb2.Start:
    """Return the message that makes a worker start a choice without earlier output.

    ``prompt_ids`` and ``sampling`` are those of the message; ``has_images`` is that of ``start``.
    """
    return session_pb2.Start(
        epoch=epoch,
        choice=choice,
        request_id=request.request_id,
        prompt_ids=prompt_ids,
        max_tokens=request.max_tokens,
        sampling=sampling.to_proto(),
        stop_token_ids=request.stop_token_ids,
        salt=request.salt,
        priority=request.priority,
        session=request.session,
        adapter=request.adapter,
        adapter_digest=request.adapter_digest,
        adapter_source=request.adapter_source,
        images=[
            session_pb2.Image(digest=image.digest, data=image.data if has_images else b"")
            for image in request.images
        ],
    )


def _prompt_ids(request: Request, first: int) -> Sequence[int]:
    return request.prompt_ids[first:] if first else request.prompt_field or request.prompt_ids


def _num_computed(live: LiveRequest, choice: Choice) -> int:
    known = len(live.request.prompt_ids) + len(choice.output)
    computed = known - 1 if len(choice.output) else 0
    return min(max(choice.num_computed, computed), known)


def _sampling(live: LiveRequest, choice: Choice) -> SamplingParams:
    sampling = live.request.sampling
    if sampling.prompt_logprobs is None or (choice.index == 0 and live.lacks_prompt_logprobs):
        return sampling
    return replace(sampling, prompt_logprobs=None)


def waiting(
    live: LiveRequest,
    gateway: str,
    moves_left: int,
    is_suspect: bool,
    chunks: Sequence[int] = (),
    cached_tokens: int = 0,
) -> Waiting:
    """Return the description of a request for the leader's queue.

    ``gateway`` is the id of this router. ``moves_left`` is how often the request may be moved to
    another worker while it is preempted. ``is_suspect`` states whether the request may have caused
    the loss of its last workers. ``chunks`` are the ids of the chunks of its known tokens. Some
    worker has the first ``cached_tokens`` of these tokens in its prefix cache.
    """
    request, unfinished = live.request, live.unfinished
    length = live.prediction.length
    return Waiting(
        request_id=request.request_id,
        gateway=gateway,
        arrived=live.arrived,
        prefill_tokens=live.known_tokens,
        max_tokens=request.max_tokens * len(unfinished) - _output_tokens(live),
        avoid=live.avoid,
        choices=len(unfinished),
        priority=request.priority,
        deadline=inf if request.deadline is None else request.deadline,
        ttft_deadline=live.ttft_deadline,
        moves_left=moves_left,
        is_suspect=is_suspect,
        predicted_tokens=sum(
            length.expected_remaining(len(choice.output), request.max_tokens)
            for choice in unfinished
        ),
        queue_key=live.prediction.queue_key,
        accepted=live.accepted,
        has_run=live.attempts > 0,
        least_tokens=live.prediction.least_tokens,
        chunks=tuple(chunks),
        cached_tokens=cached_tokens,
        session=request.session,
        adapter=request.adapter,
        adapter_digest=request.adapter_digest,
        model=request.model,
    )


def arriving(
    request: Request,
    gateway: str,
    arrived: float,
    timeout_s: float | None,
    prediction: Prediction,
    moves_left: int,
) -> Waiting:
    """Return the description of a new request, which the ledger does not have yet.

    ``gateway`` is the id of this router. ``arrived`` is the arrival in ledger time, in seconds.
    ``timeout_s`` is the time from arrival to deadline in seconds, or None without a deadline.
    ``moves_left`` is how often the request may be moved to another worker while it is preempted.
    """
    target_s = request.ttft_target_s
    return Waiting(
        request_id=request.request_id,
        gateway=gateway,
        arrived=arrived,
        prefill_tokens=len(request.prompt_ids),
        max_tokens=request.max_tokens * request.n,
        choices=request.n,
        priority=request.priority,
        deadline=inf if timeout_s is None else arrived + timeout_s,
        ttft_deadline=inf if target_s is None else arrived + target_s,
        moves_left=moves_left,
        predicted_tokens=prediction.output_tokens,
        queue_key=prediction.queue_key,
        least_tokens=prediction.least_tokens,
        chunks=request.chunks,
        cached_tokens=prediction.cached_tokens,
        session=request.session,
        adapter=request.adapter,
        adapter_digest=request.adapter_digest,
        model=request.model,
    )


def running(live: LiveRequest, gateway: str, moves_left: int) -> Running:
    return Running(
        request_id=live.request_id,
        gateway=gateway,
        worker_id=live.worker_id,
        epoch=live.epoch,
        priority=live.priority,
        known_tokens=live.known_tokens,
        arrived=live.arrived,
        moves_left=moves_left,
        choices=len(live.unfinished),
        is_preempted=live.is_preempted,
        due=live.due,
        queue_key=live.prediction.queue_key,
        adapter=live.request.adapter,
        model=live.request.model,
    )


def _output_tokens(live: LiveRequest) -> int:
    return sum(len(choice.output) for choice in live.unfinished)
