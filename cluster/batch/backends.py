"""Backends that answer the lines of a batch: a cluster, or a model in this process."""

from __future__ import annotations

import asyncio
import math
import random
import time
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from cluster.batch.lines import ChatWork, Work
from cluster.http_api import HttpApi
from cluster.llm.completion import Completion, gather
from everlift.client.client import AsyncClient
from everlift.client.retries import RECONNECT_S, Retries
from everlift.errors import EverliftError, InvalidRequest
from everlift.messages import OnDisconnect
from everlift.options import GenerateOptions

if TYPE_CHECKING:
    from cluster.llm.llm import LLM


class ClusterBackend:
    """Backend over a cluster; requests that an earlier run sent are continued, not repeated.

    The requests of an interrupted batch continue in the cluster. A later run finds them by their
    ids and attaches to them.
    """

    def __init__(self, client: AsyncClient, http: AbstractAsyncContextManager[HttpApi]) -> None:
        """Create the backend; the context manager ``http`` opens a connection for chat completions.

        The first call of ``chat`` enters ``http``, and ``aclose`` exits it.
        """
        self._client = client
        self._http_context = http
        self._http: asyncio.Future[HttpApi] | None = None

    async def complete(self, work: Work) -> Completion:
        options: GenerateOptions = {**work.options, "on_disconnect": OnDisconnect.CONTINUE}
        return await gather(self._client.generate(work.prompt, **options))

    async def chat(self, work: ChatWork) -> Any:
        if self._http is None:
            self._http = asyncio.ensure_future(self._http_context.__aenter__())
        http = await asyncio.shield(self._http)
        retries = Retries(RECONNECT_S, math.inf, random.random)
        headers = {"idempotency-key": work.request_id}
        while True:
            try:
                return await http.post("v1/chat/completions", work.body, headers)
            except EverliftError as error:
                delay = retries.delay(error, time.monotonic())
                if delay is None:
                    raise
                await asyncio.sleep(delay)

    async def aclose(self) -> None:
        if self._http is None:
            return
        # A connection that is still being opened is closed once it is open.
        await asyncio.wait([self._http])
        if not self._http.cancelled() and not self._http.exception():
            await self._http_context.__aexit__(None, None, None)


class LocalBackend:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    async def complete(self, work: Work) -> Completion:
        completion = await asyncio.wrap_future(self._llm.submit(work.prompt, **work.options))
        if completion.error is not None:
            raise completion.error
        return completion

    async def chat(self, work: ChatWork) -> Any:
        raise InvalidRequest("a chat needs a cluster: run the batch without --local")
