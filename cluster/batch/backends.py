"""Who answers a batch: a cluster, or a model in this process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.batch.lines import Work
from cluster.completion import Completion, gather
from everlift.client import AsyncClient
from everlift.messages import OnDisconnect
from everlift.options import GenerateOptions

if TYPE_CHECKING:
    from cluster.offline import LLM


class ClusterBackend:
    """A request that it sent before, perhaps in another process, is attached to. What is cut off
    goes on in the cluster, where it is found again."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def complete(self, work: Work) -> Completion:
        options: GenerateOptions = {**work.options, "on_disconnect": OnDisconnect.CONTINUE}
        return await gather(self._client.generate(work.prompt, **options))


class LocalBackend:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    async def complete(self, work: Work) -> Completion:
        completion = await asyncio.wrap_future(self._llm.submit(work.prompt, **work.options))
        if completion.error is not None:
            raise completion.error
        return completion
