"""The same requests without a server: what the engine alone takes for them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.online.online_load import Ask, Incomplete
from cluster import LLM
from everlift.options import GenerateOptions


def offline(
    model: Path,
    settings: Mapping[str, Any],
    warm_up: Sequence[Ask],
    asks: Sequence[Ask],
    pipe: Connection,
) -> None:
    """For a process of its own: sends the figures of ``asks``, all at once."""
    with LLM(model, **settings) as llm:
        _generate(llm, warm_up)
        cpu, began = time.process_time(), time.perf_counter()
        tokens = _generate(llm, asks)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    pipe.send(
        {
            "tokens_per_s": tokens / wall,
            "requests_per_s": len(asks) / wall,
            "cpu_ms": cpu / tokens * 1e3,
            "core_ms": (os.cpu_count() or 1) * wall / tokens * 1e3,
        }
    )


def _generate(llm: LLM, asks: Sequence[Ask]) -> int:
    """How many tokens came. Raises Incomplete."""
    each: list[GenerateOptions] = [{"max_tokens": ask.max_tokens} for ask in asks]
    prompts = [ask.prompt for ask in asks]
    done = llm.generate(prompts, each=each, temperature=0, ignore_eos=True, progress=False)
    tokens = sum(completion.num_output_tokens for completion in done)
    if tokens != sum(ask.max_tokens for ask in asks):
        raise Incomplete(f"{tokens} tokens offline")
    return tokens
