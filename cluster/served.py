"""Properties of the main model of a started cluster, and commands for a first request."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Protocol

from cluster.config import DEMO_MODEL, Config
from cluster.local.gpus import visible_gpus
from everlift.client.client import AsyncClient
from everlift.errors import EverliftError
from everlift.transport import internal


class Cluster(Protocol):
    @property
    def internal_address(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Served:
    """Properties of the main model.

    ``context`` is the length of the model's context, and ``longest`` that of the longest sequence
    that every worker can hold, in tokens; ``longest`` is 0 if unknown: there was no worker yet, or
    the router did not answer.
    ``has_template`` says whether the model has a chat template, and ``has_gpus`` whether this
    machine has GPUs that the cluster can use.
    """

    context: int
    longest: int
    has_template: bool
    has_gpus: bool = False

    @classmethod
    async def by(cls, config: Config, cluster: Cluster) -> Served:
        """Return the properties of the main model of the running ``cluster``."""
        context, has_template = await asyncio.to_thread(_of_files, config)
        transport = internal(config.internal_tls)
        longest = 0
        async with AsyncClient(cluster.internal_address, retry_s=0, transport=transport) as client:
            try:
                models = (await client.models()).models
                lengths = {model.name: model.max_model_len for model in models}
                longest = lengths.get(config.worker.name, 0)
            except EverliftError:
                # The length stays unknown. Later requests report the error.
                pass
        gpus = await asyncio.to_thread(visible_gpus, config.groups, os.environ)
        return cls(context, longest, has_template, bool(gpus))

    def shorter(self, config: Config) -> str:
        """Return a message with cause and remedy if ``longest`` is less than ``context``.

        The message is empty if workers can hold the full context, or if ``longest`` is unknown.
        """
        if not 0 < self.longest < self.context:
            return ""
        worker = config.worker
        if worker.max_model_len == self.longest:
            why = "worker.max_model_len is lower"
        elif worker.num_blocks is not None:
            why = "the KV cache holds no more: raise worker.num_blocks"
        elif worker.kv_cache_mib is None and (worker.device == "cuda" or self.has_gpus):
            why = "the GPU has no room for more: raise worker.tensor_parallel"
        else:
            mib = worker.cpu_kv_cache_mib
            why = f"the KV cache of {mib} MiB holds no more: raise worker.kv_cache_mib"
        return f"{self.longest:,} of the model's {self.context:,} tokens; {why}"


def first_request(config: Config, served: Served) -> str:
    """Return an everlift command line that sends a request which suits the model."""
    if config.model == str(DEMO_MODEL):
        return 'everlift generate "count from 17 to 30:" --temperature 0'
    if served.has_template:
        return "everlift chat --temperature 0"
    return 'everlift generate "Once upon a time" --max-tokens 32'


def curl(config: Config, served: Served, url: str) -> str:
    """Return a curl command line with a first request to OpenAI's API at ``url``."""
    key = "" if config.router.access == "off" else ' -H "authorization: Bearer $EVERLIFT_API_KEY"'
    text = "count from 17 to 30:" if config.model == str(DEMO_MODEL) else "Once upon a time"
    body: dict[str, object] = {"prompt": text, "max_tokens": 32}
    if served.has_template:
        body = {"messages": [{"role": "user", "content": text}]}
        if config.model != str(DEMO_MODEL):
            # At temperature 1 a small model may write nonsense up to the end of its context.
            question = {"role": "user", "content": "What is the capital of France?"}
            body = {"messages": [question], "max_tokens": 100, "temperature": 0}
    path = "chat/completions" if served.has_template else "completions"
    header = "-H 'content-type: application/json'"
    return f"curl -s {url}/v1/{path}{key} {header} -d '{json.dumps(body)}'"


def _of_files(config: Config) -> tuple[int, bool]:
    # Imported here because tokenizers are slow to import, and most commands do not need them.
    from everlift.chat_templates import Templates
    from router.requests.tokenizer import ServedModel

    model = ServedModel.load(config.model, config.model_revision)
    directory = model.directory
    has_template = directory is not None and Templates.read(directory) is not None
    return model.context, has_template
