"""Stream of one request: each token exactly once, even if connections or routers are lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from everlift.client.output_reader import OutputReader, cancel
from everlift.client.received_output import Chunk, ReceivedOutput
from everlift.client.retries import RetryBudget
from everlift.client.routers import Metadata, Routers
from everlift.messages import FinishReason
from everlift.sampling import TokenLogprobs
from everlift.v1 import inference_pb2 as pb


class Stream(AsyncIterator[Chunk]):
    """Stream of the output of a request: iterate over its chunks, or ``await stream.text()``.

    Use it in ``async with``, which closes it at the end.

    Chunks arrive as they are generated, those of each choice in the order of their offsets. Reading
    raises the EverliftError with which the request failed, Unreachable if no router answered for
    the client's ``reconnect_s`` seconds, or DataLoss if the cluster lost tokens that had been
    received.

    >>> async with client.generate("one two three") as stream:
    ...     async for chunk in stream:
    ...         print(chunk.offset, repr(chunk.text))
    0 'one'
    1 ' two'
    2 ' three'
    """

    def __init__(
        self,
        routers: Routers,
        reception: ReceivedOutput,
        budget: RetryBudget,
        submission: pb.GenerateRequest | None = None,
        metadata: Metadata = (),
    ) -> None:
        """Create the stream of a new request, or of an existing one if ``submission`` is None.

        Closing the stream cancels a new request, but not an existing one. ``metadata`` is sent with
        the submission.
        """
        self._routers = routers
        self._reception = reception
        self._reader = OutputReader(routers, reception, budget, submission, metadata)

    @property
    def request_id(self) -> str:
        """Id of the request, with which another process can attach to it.

        >>> client.generate("one two three", request_id="mine").request_id
        'mine'
        """
        return self._reception.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first choice, or None until it has ended.

        >>> stream = client.generate("one two three", max_tokens=2)
        >>> await stream.text(), stream.finish_reason
        ('one two', <FinishReason.LENGTH: 2>)
        """
        return self.finish_reasons.get(0)

    @property
    def finish_reasons(self) -> dict[int, FinishReason]:
        """Finish reasons of the choices that have ended, by the index of the choice.

        >>> stream = client.generate("one two three", n=2)
        >>> await stream.texts(), stream.finish_reasons.keys()
        (['one two three', 'one two three'], dict_keys([0, 1]))
        """
        return self._reception.finish_reasons

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of the prompt's tokens from the second one on, if requested.

        They arrive with the chunk at offset 0 of choice 0, and never if the stream begins after it.

        >>> stream = client.generate("one two")
        >>> await stream.text(), stream.prompt_logprobs
        ('one two', ())
        """
        return self._reception.prompt_logprobs

    @property
    def usage(self) -> pb.Usage | None:
        """Token counts of the prompt and of all choices, or None until the stream has ended.

        >>> stream = client.generate("one two three")
        >>> await stream.text(), stream.usage.output_tokens
        ('one two three', 3)
        """
        return self._reception.usage

    @property
    def timing(self) -> pb.Timing | None:
        """Times and counts of the request's processing; None until the stream has ended.

        >>> stream = client.generate("one two three")
        >>> await stream.text(), stream.timing.attempts
        ('one two three', 1)
        """
        return self._reception.timing

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._reader.next()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def text(self) -> str:
        """Return the rest of the text; if there are several choices, that of the first one.

        >>> stream = client.generate("one two three")
        >>> (await anext(stream)).text, await stream.text()
        ('one', ' two three')
        """
        return (await self.texts())[0]

    async def texts(self) -> list[str]:
        """Return the rest of the text of each choice, in the order of the choices.

        >>> await client.generate("one two three", n=2).texts()
        ['one two three', 'one two three']
        """
        pieces: defaultdict[int, list[str]] = defaultdict(list)
        async for chunk in self:
            pieces[chunk.choice].append(chunk.text)
        return ["".join(pieces[choice]) for choice in range(max(len(self.finish_reasons), 1))]

    async def aclose(self) -> None:
        """Close the stream, and cancel an unfinished request that it submitted. Never fails.

        >>> stream = client.generate("one two three")
        >>> (await anext(stream)).text
        'one'
        >>> await stream.aclose()
        >>> await stream.text()
        ''
        """
        was_closed = self._reader.is_closed
        self._reader.close()
        # Without a submission by this stream, the id may belong to another client's request.
        if self._reader.has_submitted and not was_closed:
            await cancel(self._routers, self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
