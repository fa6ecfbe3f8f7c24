"""A cluster of Everlift's, by its own client over gRPC."""

from __future__ import annotations

from cluster.bench.endpoint import Answer, Refused
from cluster.bench.request import Request
from everlift import AsyncClient, EverliftError


class EverliftEndpoint:
    """The client should not come again by itself with what was refused: that is an answer, too."""

    def __init__(self, client: AsyncClient, *, ignore_eos: bool, temperature: float) -> None:
        self._client = client
        self._ignore_eos = ignore_eos
        self._temperature = temperature

    async def ask(self, request: Request, answer: Answer) -> None:
        try:
            stream = self._client.generate(
                request.prompt,
                max_tokens=request.max_tokens,
                ignore_eos=self._ignore_eos,
                temperature=self._temperature,
            )
            answer.is_sent()
            async with stream:
                async for chunk in stream:
                    answer.piece(chunk.text, len(chunk.token_ids))
        except EverliftError as error:
            raise Refused(error.slug) from None
        if stream.usage is not None:
            answer.usage(stream.usage.prompt_tokens, stream.usage.output_tokens)
