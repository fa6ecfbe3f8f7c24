"""The client for programs without an event loop: the same calls, each waiting for its answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from everlift.client import AsyncClient, GenerateOptions, Prompt
from everlift.messages import FinishReason
from everlift.sampling import TokenLogprobs
from everlift.stream import Chunk, Stream
from everlift.tls import Tls
from everlift.v1 import inference_pb2 as pb

T = TypeVar("T")


class Client:
    """An AsyncClient on an event loop of its own, in a thread. May be used from several threads."""

    def __init__(
        self, targets: str | Sequence[str], *, tls: Tls | None = None, reconnect_s: float = 30.0
    ) -> None:
        self._client = AsyncClient(targets, tls=tls, reconnect_s=reconnect_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="everlift-client", daemon=True
        )
        self._thread.start()

    def generate(
        self, prompt: Prompt, *, traceparent: str = "", **options: Unpack[GenerateOptions]
    ) -> BlockingStream:
        """As AsyncClient.generate."""
        stream = self._client.generate(prompt, traceparent=traceparent, **options)
        return BlockingStream(self, stream)

    def attach(
        self,
        request_id: str,
        from_offset: int | Sequence[int] = 0,
        *,
        received: Sequence[Sequence[int]] = (),
    ) -> BlockingStream:
        """As AsyncClient.attach."""
        return BlockingStream(self, self._client.attach(request_id, from_offset, received=received))

    def cancel(self, request_id: str) -> pb.CancelResponse:
        """As AsyncClient.cancel."""
        return self.run(self._client.cancel(request_id))

    def forget(self, request_id: str) -> None:
        """As AsyncClient.forget."""
        self.run(self._client.forget(request_id))

    def get_request(self, request_id: str) -> pb.GetRequestResponse:
        """As AsyncClient.get_request."""
        return self.run(self._client.get_request(request_id))

    def status(self) -> pb.GetStatusResponse:
        """As AsyncClient.status."""
        return self.run(self._client.status())

    def close(self) -> None:
        """As AsyncClient.close. Closing twice is closing once."""
        if not self._loop.is_closed():
            self.run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled if waiting for it is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class BlockingStream(Iterator[Chunk]):
    """As Stream: iterate it, or call ``text()``; best inside ``with``, whose end closes it."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client = client
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
        chunk = self._client.run(self._next())
        if chunk is None:
            raise StopIteration
        return chunk

    def text(self) -> str:
        """The whole rest of the text: of the first choice, if there are several."""
        return self._client.run(self._stream.text())

    def texts(self) -> list[str]:
        """The whole rest of each choice's text."""
        return self._client.run(self._stream.texts())

    def close(self) -> None:
        """Ends the request if it is this stream's own and unfinished. Never fails."""
        self._client.run(self._stream.aclose())

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
        # StopAsyncIteration cannot leave a task.
        return await anext(self._stream, None)
