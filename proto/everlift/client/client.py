"""Asynchronous client, whose streams survive the loss of connections, routers and workers.

>>> async with AsyncClient("127.0.0.1:50051") as client:
...     async with client.generate("one two three") as stream:
...         async for chunk in stream:
...             print(chunk.text, end="")
one two three
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self, TypeAlias, TypeVar, Unpack

import grpc

from everlift import wire
from everlift.checks import sendable
from everlift.client.generate_many import ManyStream
from everlift.client.received_output import ReceivedOutput
from everlift.client.retries import (
    RECONNECT_S,
    RETRY_S,
    Deadline,
    Retries,
    RetryBudget,
    is_unavailable,
)
from everlift.client.routers import Metadata, Routers
from everlift.client.stream import Stream
from everlift.errors import (
    DeadlineExceeded,
    EverliftError,
    InvalidRequest,
    UnknownModel,
    UnknownRequest,
    Unreachable,
)
from everlift.messages import MAX_REQUESTS
from everlift.options import GenerateOptions, Prompt, request_id_of, submission_message
from everlift.request_id import check_request_id
from everlift.tls import Tls
from everlift.trace_context import TRACEPARENT, TraceContext
from everlift.transport import Transport, secured
from everlift.v1 import admin_pb2, chaos_pb2
from everlift.v1 import inference_pb2 as pb

Q = TypeVar("Q")
A = TypeVar("A")
#: Function that returns a method of the router that is current when the function is called.
_Method: TypeAlias = Callable[[], grpc.aio.UnaryUnaryMultiCallable[Q, A]]

#: Seconds without an answer after which a single call is sent to the next router, because the
#: current router may be frozen.
_TRY_TIMEOUT_S = 10.0
#: The same for a call to load an adapter, which workers may download in up to 300 s.
_LOAD_TIMEOUT_S = 310.0


class AsyncClient:
    """Client that uses one router at a time, and the next one when that router fails.

    ``generate``, ``generate_many`` and ``attach`` return streams. All other calls are single calls,
    which return a message of ``everlift.v1`` or None. Errors are those of ``everlift.errors``; a
    value that no message can hold raises InvalidRequest.

    ``targets`` is an address such as "host:50051", or several. Every call carries ``api_key`` in
    its metadata; the key is sent nowhere else. ``tls`` enables TLS. A ``transport`` replaces the
    default one, which creates gRPC channels with or without TLS; ``tls`` is then ignored.

    While no router answers, a stream is retried for ``reconnect_s`` seconds and a single call for
    ``retry_s`` seconds. Any call that is refused for lack of capacity or quota is retried for
    ``retry_s`` seconds. 0 disables the retries. The delays between retries increase, and are never
    shorter than the error's ``retry_after_s``. Even without retries, a single call that a router
    does not answer is sent once to each other router, without a delay. The ``timeout_s`` of a
    single call covers all its attempts; with None, only ``retry_s`` limits them.

    A client may be created outside of an event loop, and is used within one.

    >>> client = AsyncClient(["10.0.0.1:50051", "10.0.0.2:50051"], api_key="ev_1_secret")
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        reconnect_s: float = RECONNECT_S,
        retry_s: float = RETRY_S,
        transport: Transport | None = None,
    ) -> None:
        """Create a client, which connects at its first call.

        Raises ValueError if ``targets`` is empty, and SettingsError for invalid TLS files or an
        API key that no header can contain.
        """
        addresses = [targets] if isinstance(targets, str) else targets
        self._routers = Routers(addresses, transport or secured(tls), api_key)
        self._reconnect_s = reconnect_s
        self._retry_s = retry_s

    def generate(
        self, prompt: Prompt, *, traceparent: str = "", **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Return the stream of a new request, whose prompt is a text or token ids.

        The first read of the stream submits the request, and closing the stream cancels it.
        ``traceparent`` is the caller's span in the format of W3C Trace Context. Raises
        InvalidRequest for a value that fails a check of the client, such as a number out of range,
        and TypeError for an unknown option. Other invalid values, such as an empty prompt, are
        rejected by the router: reading the stream then raises the error.

        >>> await client.generate("one two three four", max_tokens=2, temperature=0).text()
        'one two'
        """
        submission = submission_message(prompt, options)
        return Stream(
            self._routers,
            ReceivedOutput(submission.request_id),
            self._budget(Deadline(options.get("timeout_s"))),
            submission,
            _trace(traceparent),
        )

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = MAX_REQUESTS,
        traceparent: str = "",
        **options: Unpack[GenerateOptions],
    ) -> ManyStream:
        """Return the stream of one new request per prompt, at most ``concurrency`` at a time.

        The option ``request_id`` is the prefix of all ids: "job" yields "job:0" and "job:1". The
        first read of the stream submits requests, and closing it cancels the unfinished ones.

        Raises InvalidRequest if a value of any request fails a check of the client, as in
        ``generate``; then no request is sent. If the router rejects a request, only that request
        fails. Raises TypeError for an unknown option or if ``prompts`` is one text instead of a
        list, and ValueError if ``concurrency`` is below 1.

        >>> await client.generate_many(["one two", "three four"], max_tokens=1).texts()
        ['one', 'three']
        """
        if isinstance(prompts, str | bytes):
            raise TypeError("generate_many() takes a list of prompts, not one")
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        name = request_id_of(options)
        return ManyStream(
            self._routers,
            (
                submission_message(prompt, {**options, "request_id": f"{name}:{index}"})
                for index, prompt in enumerate(prompts)
            ),
            self._retries,
            options.get("timeout_s"),
            concurrency,
            _trace(traceparent),
        )

    def attach(
        self,
        request_id: str,
        from_offset: int | Sequence[int] = 0,
        *,
        received: Sequence[Sequence[int]] = (),
    ) -> Stream:
        """Return the stream of an existing request, from a token offset of each choice on.

        ``from_offset`` is the offset for the first choice, or a list with one for each choice.
        Alternatively, ``received`` contains the tokens of each choice that were received before,
        perhaps by another process, and the stream continues after them.

        The cluster may have lost some of the tokens before the offset. With ``received``, the
        cluster regenerates them, and the stream raises DataLoss if the new tokens differ. With
        ``from_offset``, the stream raises OffsetOutOfRange.

        Closing this stream does not cancel the request. Raises InvalidRequest if both parameters
        are given or the request id is invalid, and OutOfRange if an offset does not fit into an
        int64, or a token id into a uint32.

        >>> await client.generate("one two three four", request_id="r").text()
        'one two three four'
        >>> await client.attach("r", from_offset=2).text()
        ' three four'
        """
        check_request_id(request_id)
        offsets = [from_offset] if isinstance(from_offset, int) else from_offset
        if any(offsets) and received:
            raise InvalidRequest("give either received or from_offset")
        with sendable():
            reception = ReceivedOutput(request_id, offsets, received)
            reception.attach_request()
        return Stream(self._routers, reception, self._budget(Deadline(None)))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> pb.CancelResponse:
        """Cancel a request unless it has already ended, and return its state after that.

        Raises UnknownRequest if the cluster does not know the request.

        >>> await client.generate("one two", request_id="r").text()
        'one two'
        >>> RequestState.Name((await client.cancel("r")).state)
        'REQUEST_STATE_FINISHED'
        """
        with sendable():
            message = pb.CancelRequest(request_id=request_id)
        return await self._call(lambda: self._routers.inference().Cancel, message, timeout_s)

    async def forget(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Erase a request, its prompt and its outputs.

        A request that has not ended is cancelled first. Raises UnknownRequest if the cluster does
        not know the request, unless the call was retried and may have erased it before.

        >>> await client.generate("one two", request_id="r").text()
        'one two'
        >>> await client.forget("r")
        """
        with sendable():
            message = pb.ForgetRequest(request_id=request_id)
        method = self._routers.inference
        await self._remove(lambda: method().Forget, message, timeout_s, UnknownRequest)

    async def get_request(
        self, request_id: str, *, timeout_s: float | None = None
    ) -> pb.GetRequestResponse:
        """Return the state, the counters and the error of a request, without its tokens.

        Raises UnknownRequest if the cluster does not know the request.

        >>> await client.generate("one two", request_id="r").text()
        'one two'
        >>> (await client.get_request("r")).output_tokens
        2
        """
        with sendable():
            message = pb.GetRequestRequest(request_id=request_id)
        return await self._call(lambda: self._routers.inference().GetRequest, message, timeout_s)

    async def explain(self, request_id: str, *, timeout_s: float | None = None) -> pb.Explanation:
        """Return how long a request spent in each phase, such as queue and decode, up to now.

        For a request that has ended, the time up to its end is returned. The spans follow each
        other and add up to the total time. Raises UnknownRequest if the cluster does not know the
        request.

        >>> await client.generate("one two", request_id="r").text()
        'one two'
        >>> explanation = await client.explain("r")
        >>> [span.seconds for span in explanation.spans], explanation.total_s
        ([0.125, 0.375], 0.5)
        """
        with sendable():
            message = pb.ExplainRequest(request_id=request_id)
        return await self._call(lambda: self._routers.inference().Explain, message, timeout_s)

    async def list_requests(
        self,
        *,
        states: Sequence[pb.RequestState.ValueType] = (),
        page_size: int = 0,
        page_token: str = "",
        tenant: str | None = None,
        session_id: str = "",
        timeout_s: float | None = None,
    ) -> pb.ListRequestsResponse:
        """Return a page of the caller's requests, newest first; ``states`` selects by state.

        With a ``session_id``, only requests of this session are returned.

        The answer's ``next_page_token`` is the ``page_token`` of the next page; it is empty on the
        last page. With ``states``, a page may be short or empty although another page follows. A
        ``page_size`` of 0 selects the server's default. An administrator of the cluster may name a
        ``tenant``, or "" for all tenants.

        Raises InvalidRequest for an invalid ``page_token``, OutOfRange for too large a
        ``page_size``, and Forbidden if the API key does not permit the call.

        >>> await client.generate_many(["a", "b", "c"], request_id="job").texts()
        ['a', 'b', 'c']
        >>> page = await client.list_requests(page_size=2)
        >>> [request.request_id for request in page.requests]
        ['job:2', 'job:1']
        >>> page = await client.list_requests(page_size=2, page_token=page.next_page_token)
        >>> [request.request_id for request in page.requests], page.next_page_token
        (['job:0'], '')
        """
        with sendable():
            message = pb.ListRequestsRequest(
                states=states,
                page_size=page_size,
                page_token=page_token,
                tenant=tenant,
                session_id=session_id,
            )
        return await self._call(lambda: self._routers.inference().ListRequests, message, timeout_s)

    async def tokenize(
        self, text: str, *, model: str = "", timeout_s: float | None = None
    ) -> pb.TokenizeResponse:
        """Return the token ids of a text, tokenised as a prompt is.

        Raises UnknownModel if ``model`` is given and not served, and PromptTextTooLong if the text
        has far more characters than the model's context can hold.

        >>> list((await client.tokenize("ab")).token_ids)
        [97, 98]
        """
        with sendable():
            message = pb.TokenizeRequest(model=model, text=text)
        return await self._call(lambda: self._routers.inference().Tokenize, message, timeout_s)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None
    ) -> pb.DetokenizeResponse:
        """Return the text of token ids.

        Raises UnknownModel if ``model`` is given and not served, and OutOfRange for an id that the
        vocabulary does not have or for more ids than the model's context can hold.

        >>> (await client.detokenize([97, 98])).text
        'ab'
        """
        with sendable():
            message = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return await self._call(lambda: self._routers.inference().Detokenize, message, timeout_s)

    async def models(self, *, timeout_s: float | None = None) -> pb.ListModelsResponse:
        """Return the models that requests may name as ``model``, and the router's HTTP address.

        >>> [model.name for model in (await client.models()).models]
        ['fake']
        """
        message = pb.ListModelsRequest()
        return await self._call(lambda: self._routers.inference().ListModels, message, timeout_s)

    async def status(self, *, timeout_s: float | None = None) -> pb.GetStatusResponse:
        """Return the state of the cluster's workers and queue, as one router knows it.

        Counters, such as ``completed``, are those of this router since it started.

        >>> (await client.status()).running
        0
        """
        message = pb.GetStatusRequest()
        return await self._call(lambda: self._routers.inference().GetStatus, message, timeout_s)

    async def change_model(
        self, worker_id: str, model: str, *, timeout_s: float | None = None
    ) -> admin_pb2.ChangeModelResponse:
        """Tell a worker to drain and then to join as a new worker that serves another model.

        The call does not wait for the change. The worker obtains the files of the new model before
        it drains; its requests resume on other workers. ``worker_id`` may be shortened to a prefix
        that only one worker has. Raises UnknownWorker if no worker or several workers have this
        prefix, and UnknownModel for a model that the cluster does not serve. Raises Forbidden if
        the API key does not permit the call.

        Raises InvalidRequest if the worker cannot serve the model, is draining, or is already
        changing its model. Also raises InvalidRequest if ``model`` is empty, or if an autoscaler
        sets the number of workers of one of the two models.

        >>> (await client.change_model("wor", "org/other")).model
        'org/other'
        """
        with sendable():
            message = admin_pb2.ChangeModelRequest(worker_id=worker_id, model=model)
        return await self._call(lambda: self._routers.admin().ChangeModel, message, timeout_s)

    async def drain(
        self, worker_id: str, *, timeout_s: float | None = None
    ) -> admin_pb2.DrainResponse:
        """Drain a worker: it accepts no more requests, and its requests resume on other workers.

        ``worker_id`` may be shortened to a prefix that only one worker has. Raises UnknownWorker if
        no worker or several workers have this prefix, and Forbidden if the API key does not permit
        the call.

        >>> (await client.drain("wor")).worker_id
        'worker-0'
        """
        with sendable():
            message = admin_pb2.DrainRequest(worker_id=worker_id)
        return await self._call(lambda: self._routers.admin().Drain, message, timeout_s)

    async def set_policy(
        self,
        *,
        order: str | None = None,
        max_queued: int | None = None,
        queue_ttl: float | None = None,
        refuse_late: bool | None = None,
        undated_due: float | None = None,
        ageing_factor: float | None = None,
        starvation: float | None = None,
        class_floor: float | None = None,
        fair_share: bool | None = None,
        tpot_target: float | None = None,
        engine_policy: str | None = None,
        reset: Collection[str] = (),
        timeout_s: float | None = None,
    ) -> admin_pb2.SetPolicyResponse:
        """Change policies of the admission queue and the engines of the cluster at run time.

        Each parameter overrides the routers' setting of the same name (router.NAME), and
        ``engine_policy`` overrides worker.scheduling.policy. A setting that is None stays the same,
        and a setting that ``reset`` names returns to its configured value. A change applies to the
        whole cluster until the next change. The answer contains all settings that are then in
        effect. Raises InvalidRequest for an invalid value, and Forbidden if the API key does not
        permit the call.

        >>> policy = await client.set_policy(order="deadline", ageing_factor=0.1)
        >>> policy.order, policy.max_queued, list(policy.overridden)
        ('deadline', 1000, ['order', 'ageing_factor'])
        >>> list((await client.set_policy(reset=["order"])).overridden)
        ['ageing_factor']
        """
        with sendable():
            message = admin_pb2.SetPolicyRequest(
                order=order,
                max_queued=max_queued,
                queue_ttl=queue_ttl,
                refuse_late=refuse_late,
                undated_due=undated_due,
                ageing_factor=ageing_factor,
                starvation=starvation,
                class_floor=class_floor,
                fair_share=fair_share,
                tpot_target=tpot_target,
                engine_policy=engine_policy,
                reset=reset,
            )
        return await self._call(lambda: self._routers.admin().SetPolicy, message, timeout_s)

    async def load_adapter(
        self, name: str, source: str, *, model: str = "", timeout_s: float | None = None
    ) -> admin_pb2.AdapterInfo:
        """Add a LoRA adapter to the cluster, or a new version of one.

        Requests that are dispatched later use the new version, unless they already have output.
        ``source`` is a hub id, or an absolute path below the directory that the setting
        worker.adapter_dir names at the workers. ``model`` is the model that the adapter adapts. An
        empty ``model`` selects that of the present version or, for a new adapter, the cluster's
        first model.

        One worker of the model checks the adapter first. Raises InvalidRequest if ``name`` or
        ``source`` is invalid, or if that worker cannot load the adapter. Also raises
        InvalidRequest if ``name`` belongs to a model, to an adapter in the cluster's settings, or
        to an adapter of another model. Raises UnknownModel if ``model`` is not served, NoWorker if
        no worker of the model is connected, and UnknownWorker if the checking worker does not
        answer. Raises Forbidden if the API key does not permit the call.

        >>> (await client.load_adapter("sql", "org/sql-lora")).name
        'sql'
        """
        with sendable():
            message = admin_pb2.LoadAdapterRequest(name=name, source=source, model=model)
        answer = await self._call(
            lambda: self._routers.admin().LoadAdapter, message, timeout_s, try_s=_LOAD_TIMEOUT_S
        )
        return answer.adapter

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Remove a LoRA adapter that was added with ``load_adapter``.

        Requests that already have output continue with the adapter. Requests without output that
        are dispatched later fail with UnknownModel. Raises UnknownModel if no adapter has this
        name, unless the call was retried and may have removed it before. Raises InvalidRequest if
        the name is in the cluster's settings, and Forbidden if the API key does not permit the
        call.

        >>> adapter = await client.load_adapter("sql", "org/sql-lora")
        >>> await client.unload_adapter(adapter.name)
        """
        with sendable():
            message = admin_pb2.UnloadAdapterRequest(name=name)
        method = self._routers.admin
        await self._remove(lambda: method().UnloadAdapter, message, timeout_s, UnknownModel)

    async def adapters(self, *, timeout_s: float | None = None) -> admin_pb2.ListAdaptersResponse:
        """Return the LoRA adapters of the cluster.

        >>> [adapter.name for adapter in (await client.adapters()).adapters]
        []
        """
        message = admin_pb2.ListAdaptersRequest()
        return await self._call(lambda: self._routers.admin().ListAdapters, message, timeout_s)

    async def capacity(self, *, timeout_s: float | None = None) -> admin_pb2.CapacityResponse:
        """Return the cluster's capacity, and how much of it is in use.

        Raises Forbidden if the API key does not permit the call.

        >>> capacity = await client.capacity()
        >>> capacity.workers, capacity.slots
        (1, 256)
        """
        message = admin_pb2.CapacityRequest()
        return await self._call(lambda: self._routers.admin().Capacity, message, timeout_s)

    async def inject(
        self, fault: chaos_pb2.Fault, *, timeout_s: float | None = None
    ) -> chaos_pb2.InjectResponse:
        """Inject a fault into a cluster that was started with chaos allowed.

        A router that does not answer receives the fault only once, because the fault may have taken
        effect although the answer was lost. The other routers are then tried, each once. The fault
        may therefore take effect several times.

        Raises ChaosForbidden if chaos is not allowed, and InvalidRequest for an invalid fault.
        Raises UnknownWorker if the target or the peer is unknown or ambiguous.

        >>> fault = chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_KILL, target="any-worker")
        >>> await client.inject(fault)
        Traceback (most recent call last):
            ...
        everlift.errors.ChaosForbidden: the cluster was started without chaos
        """
        once = Retries(0.0, 0.0, random.random)
        return await self._call(lambda: self._routers.chaos().Inject, fault, timeout_s, once)

    async def close(self) -> None:
        """Close the client; calls and reads of an unfinished Stream then raise Unreachable.

        The unfinished requests of a ManyStream fail with Unreachable in its ``outcomes``. The
        routers treat each unfinished request according to the request's ``on_disconnect``.

        >>> await client.close()
        >>> await client.status()
        Traceback (most recent call last):
            ...
        everlift.errors.Unreachable: the client is closed
        """
        await self._routers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _call(
        self,
        method: _Method[Q, A],
        request: Q,
        timeout_s: float | None,
        retries: Retries | None = None,
        *,
        try_s: float | None = None,
    ) -> A:
        retries = retries or Retries(self._retry_s, self._retry_s, random.random)
        budget = RetryBudget(self._routers, retries, Deadline(timeout_s))
        tries = 0
        while True:
            tries += 1
            router, remaining = self._routers.current, budget.remaining()
            try:
                return await self._attempt(method, request, remaining, try_s or _TRY_TIMEOUT_S)
            except DeadlineExceeded as error:
                raise budget.error_at_deadline(error) from None
            except EverliftError as error:
                if is_unavailable(error) and tries < len(self._routers):
                    self._routers.report_failure(router)
                else:
                    await budget.wait(error, router)

    async def _remove(
        self,
        method: _Method[Q, A],
        request: Q,
        timeout_s: float | None,
        missing: type[EverliftError],
    ) -> None:
        """Make a call that removes an object; ``missing`` is its error if there is no such object.

        After a retry, that error counts as a success: the answer to the attempt that removed the
        object may have been lost.
        """
        attempts = 0

        def counted() -> grpc.aio.UnaryUnaryMultiCallable[Q, A]:
            nonlocal attempts
            attempts += 1
            return method()

        try:
            await self._call(counted, request, timeout_s)
        except missing:
            if attempts == 1:
                raise

    async def _attempt(
        self, method: _Method[Q, A], request: Q, remaining: float | None, try_s: float
    ) -> A:
        is_last = remaining is not None and remaining <= try_s
        timeout = remaining if is_last else try_s
        call = method()(request, timeout=timeout, metadata=self._routers.metadata)
        try:
            return await wire.answer(call, call)
        except DeadlineExceeded as error:
            if is_last:
                raise
            raise Unreachable(f"no answer within {try_s:g} s") from error

    def _budget(self, deadline: Deadline) -> RetryBudget:
        return RetryBudget(self._routers, self._retries(), deadline)

    def _retries(self) -> Retries:
        return Retries(self._reconnect_s, self._retry_s, random.random)


def _trace(traceparent: str) -> Metadata:
    if not traceparent:
        return ()
    if TraceContext.parse(traceparent) is None:
        raise InvalidRequest("traceparent must have the form 00-TRACE_ID-SPAN_ID-FLAGS (W3C)")
    return ((TRACEPARENT, traceparent),)
