"""ModelStreamInfer call: many requests on one stream, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from router.api.kserve.v2 import open_inference_pb2 as pb

#: Maximum number of concurrent requests of one stream. A further request waits until one has ended.
MAX_CONCURRENT = 256

Answers = AsyncGenerator[pb.ModelStreamInferResponse, None]


class InferStream:
    """Execution of the requests of one stream, up to ``max_concurrent`` of them at the same time.

    ``answer`` is called with the bytes of each message, and yields the answers to the message. It
    must report errors as answers, and must not raise.
    """

    def __init__(
        self, answer: Callable[[bytes], Answers], max_concurrent: int = MAX_CONCURRENT
    ) -> None:
        self._answer = answer
        self._slots = asyncio.Semaphore(max_concurrent)
        # None marks the end. If the client does not read, one answer waits in this queue, and one
        # in the task of each request. Newer output stays in the stream of its request, where it is
        # merged into one answer.
        self._answers = asyncio.Queue[pb.ModelStreamInferResponse | None](1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def answers(self, messages: AsyncIterator[bytes]) -> Answers:
        """Yield the answers to all messages.

        Answers to the same message are in order; those to different messages are mixed. Unfinished
        requests are cancelled when the generator is closed.
        """
        reading = asyncio.create_task(self._read(messages))
        ending = asyncio.create_task(self._end(reading))
        try:
            while (answer := await self._answers.get()) is not None:
                yield answer
            reading.result()
        finally:
            await _cancel(reading, ending, *self._tasks)

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        async for data in messages:
            answers = self._answer(data)
            await self._slots.acquire()
            task = asyncio.create_task(self._forward(answers))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()

    async def _forward(self, answers: Answers) -> None:
        async with aclosing(answers):
            async for answer in answers:
                await self._answers.put(answer)

    async def _end(self, reading: asyncio.Task[None]) -> None:
        await asyncio.wait([reading])
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._answers.put(None)


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
