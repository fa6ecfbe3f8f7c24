"""Blocking client for programs without an event loop, with the same calls as AsyncClient.

>>> with Client("127.0.0.1:50051") as client, client.generate("one two three") as stream:
...     for chunk in stream:
...         print(chunk.text, end="")
one two three
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from everlift.client.client import AsyncClient
from everlift.client.generate_many import ManyStream, Outcome
from everlift.client.received_output import Chunk
from everlift.client.retries import RECONNECT_S, RETRY_S
from everlift.client.stream import Stream
from everlift.errors import EverliftError, Unreachable
from everlift.messages import MAX_REQUESTS, FinishReason
from everlift.options import GenerateOptions, Prompt
from everlift.sampling import TokenLogprobs
from everlift.tls import Tls
from everlift.transport import Transport
from everlift.v1 import admin_pb2, chaos_pb2
from everlift.v1 import inference_pb2 as pb

T = TypeVar("T")

_CLOSED = "the client is closed"


class _LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="everlift-client", daemon=True
        )
        #: held while work is submitted, so that none is submitted after ``close``
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the event loop of the thread, and wait for its result.

        If the wait is interrupted, for example by Ctrl-C, ``work`` is cancelled. Raises Unreachable
        if the thread is closed, before or during the wait.
        """
        with self._lock:
            if self._is_closed:
                work.close()
                raise Unreachable(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            # Only ``close`` cancels work before its wait ends.
            raise Unreachable(_CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def close(self, last_work: Coroutine[Any, Any, None]) -> None:
        """Run ``last_work``, cancel all other work, and end the thread.

        A second call does nothing.
        """
        with self._lock:
            if self._is_closed:
                last_work.close()
                return
            self._is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(_finish(last_work), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _finish(last_work: Coroutine[Any, Any, None]) -> None:
    await last_work
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Client:
    """Blocking form of AsyncClient, which may be used from several threads.

    The AsyncClient runs on an event loop in a thread of its own.
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
        """See AsyncClient."""
        self._client = AsyncClient(
            targets,
            api_key=api_key,
            tls=tls,
            reconnect_s=reconnect_s,
            retry_s=retry_s,
            transport=transport,
        )
        self._thread = _LoopThread()

    def generate(
        self, prompt: Prompt, *, traceparent: str = "", **options: Unpack[GenerateOptions]
    ) -> BlockingStream:
        """See AsyncClient.generate."""
        stream = self._client.generate(prompt, traceparent=traceparent, **options)
        return BlockingStream(self._thread, stream)

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = MAX_REQUESTS,
        traceparent: str = "",
        **options: Unpack[GenerateOptions],
    ) -> BlockingManyStream:
        """See AsyncClient.generate_many."""
        stream = self._client.generate_many(
            prompts, concurrency=concurrency, traceparent=traceparent, **options
        )
        return BlockingManyStream(self._thread, stream)

    def attach(
        self,
        request_id: str,
        from_offset: int | Sequence[int] = 0,
        *,
        received: Sequence[Sequence[int]] = (),
    ) -> BlockingStream:
        """See AsyncClient.attach."""
        stream = self._client.attach(request_id, from_offset, received=received)
        return BlockingStream(self._thread, stream)

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> pb.CancelResponse:
        """See AsyncClient.cancel."""
        return self._run(self._client.cancel(request_id, timeout_s=timeout_s))

    def forget(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """See AsyncClient.forget."""
        self._run(self._client.forget(request_id, timeout_s=timeout_s))

    def get_request(
        self, request_id: str, *, timeout_s: float | None = None
    ) -> pb.GetRequestResponse:
        """See AsyncClient.get_request."""
        return self._run(self._client.get_request(request_id, timeout_s=timeout_s))

    def explain(self, request_id: str, *, timeout_s: float | None = None) -> pb.Explanation:
        """See AsyncClient.explain."""
        return self._run(self._client.explain(request_id, timeout_s=timeout_s))

    def list_requests(
        self,
        *,
        states: Sequence[pb.RequestState.ValueType] = (),
        page_size: int = 0,
        page_token: str = "",
        tenant: str | None = None,
        session_id: str = "",
        timeout_s: float | None = None,
    ) -> pb.ListRequestsResponse:
        """See AsyncClient.list_requests."""
        return self._run(
            self._client.list_requests(
                states=states,
                page_size=page_size,
                page_token=page_token,
                tenant=tenant,
                session_id=session_id,
                timeout_s=timeout_s,
            )
        )

    def tokenize(
        self, text: str, *, model: str = "", timeout_s: float | None = None
    ) -> pb.TokenizeResponse:
        """See AsyncClient.tokenize."""
        return self._run(self._client.tokenize(text, model=model, timeout_s=timeout_s))

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None
    ) -> pb.DetokenizeResponse:
        """See AsyncClient.detokenize."""
        return self._run(self._client.detokenize(token_ids, model=model, timeout_s=timeout_s))

    def models(self, *, timeout_s: float | None = None) -> pb.ListModelsResponse:
        """See AsyncClient.models."""
        return self._run(self._client.models(timeout_s=timeout_s))

    def status(self, *, timeout_s: float | None = None) -> pb.GetStatusResponse:
        """See AsyncClient.status."""
        return self._run(self._client.status(timeout_s=timeout_s))

    def change_model(
        self, worker_id: str, model: str, *, timeout_s: float | None = None
    ) -> admin_pb2.ChangeModelResponse:
        """See AsyncClient.change_model."""
        return self._run(self._client.change_model(worker_id, model, timeout_s=timeout_s))

    def drain(self, worker_id: str, *, timeout_s: float | None = None) -> admin_pb2.DrainResponse:
        """See AsyncClient.drain."""
        return self._run(self._client.drain(worker_id, timeout_s=timeout_s))

    def set_policy(
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
        """See AsyncClient.set_policy."""
        return self._run(
            self._client.set_policy(
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
                timeout_s=timeout_s,
            )
        )

    def load_adapter(
        self, name: str, source: str, *, model: str = "", timeout_s: float | None = None
    ) -> admin_pb2.AdapterInfo:
        """See AsyncClient.load_adapter."""
        return self._run(self._client.load_adapter(name, source, model=model, timeout_s=timeout_s))

    def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """See AsyncClient.unload_adapter."""
        self._run(self._client.unload_adapter(name, timeout_s=timeout_s))

    def adapters(self, *, timeout_s: float | None = None) -> admin_pb2.ListAdaptersResponse:
        """See AsyncClient.adapters."""
        return self._run(self._client.adapters(timeout_s=timeout_s))

    def capacity(self, *, timeout_s: float | None = None) -> admin_pb2.CapacityResponse:
        """See AsyncClient.capacity."""
        return self._run(self._client.capacity(timeout_s=timeout_s))

    def inject(
        self, fault: chaos_pb2.Fault, *, timeout_s: float | None = None
    ) -> chaos_pb2.InjectResponse:
        """See AsyncClient.inject."""
        return self._run(self._client.inject(fault, timeout_s=timeout_s))

    def close(self) -> None:
        """See AsyncClient.close. A second call does nothing."""
        self._thread.close(self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work)


class BlockingStream(Iterator[Chunk]):
    """Blocking form of Stream: iterate over its chunks, or call ``text()``.

    Use it in ``with``, which closes it at the end.
    """

    def __init__(self, thread: _LoopThread, stream: Stream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stream.finish_reason

    @property
    def finish_reasons(self) -> dict[int, FinishReason]:
        return self._stream.finish_reasons

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self._stream.prompt_logprobs

    @property
    def usage(self) -> pb.Usage | None:
        return self._stream.usage

    @property
    def timing(self) -> pb.Timing | None:
        return self._stream.timing

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._thread.run(self._next())
        if chunk is None:
            raise StopIteration
        return chunk

    def text(self) -> str:
        """See Stream.text."""
        return self._thread.run(self._stream.text())

    def texts(self) -> list[str]:
        """See Stream.texts."""
        return self._thread.run(self._stream.texts())

    def close(self) -> None:
        """See Stream.aclose."""
        with suppress(Unreachable):
            self._thread.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _next(self) -> Chunk | None:
        # None marks the end, because a task cannot raise StopAsyncIteration.
        return await anext(self._stream, None)


class BlockingManyStream(Iterator[tuple[int, Chunk]]):
    """Blocking form of ManyStream: iterate over its chunks, or call ``texts()``.

    Use it in ``with``, which closes it at the end.
    """

    def __init__(self, thread: _LoopThread, stream: ManyStream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def request_ids(self) -> tuple[str, ...]:
        return self._stream.request_ids

    @property
    def outcomes(self) -> dict[int, Outcome]:
        return self._stream.outcomes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Chunk]:
        item = self._thread.run(self._next())
        if item is None:
            raise StopIteration
        return item

    def texts(self) -> list[str | EverliftError]:
        """See ManyStream.texts."""
        return self._thread.run(self._stream.texts())

    def close(self) -> None:
        """See ManyStream.aclose."""
        with suppress(Unreachable):
            self._thread.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _next(self) -> tuple[int, Chunk] | None:
        return await anext(self._stream, None)
