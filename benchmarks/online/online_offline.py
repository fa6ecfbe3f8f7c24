"""Offline baseline of bench-online: the same requests in the engine, without a server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.online.online_load import Incomplete, TimedRequest
from cluster import LLM
from everlift.options import GenerateOptions


def offline(
    model: Path,
    settings: Mapping[str, Any],
    warm_up: Sequence[TimedRequest],
    requests: Sequence[TimedRequest],
    pipe: Connection,
) -> None:
    """Generate for all ``requests`` at once, ignoring due times; send the figures to ``pipe``.

    The function runs in a process of its own (benchmarks/child.py). Raises Incomplete.
    """
    with LLM(model, **settings) as llm:
        _generate(llm, warm_up)
        cpu, began = time.process_time(), time.perf_counter()
        tokens = _generate(llm, requests)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    pipe.send(
        {
            "tokens_per_s": tokens / wall,
            "requests_per_s": len(requests) / wall,
            "cpu_ms": cpu / tokens * 1e3,
            "core_ms": (os.cpu_count() or 1) * wall / tokens * 1e3,
        }
    )


def _generate(llm: LLM, requests: Sequence[TimedRequest]) -> int:
    """Return the number of output tokens. Raises Incomplete if it is not the requested one."""
    each: list[GenerateOptions] = [{"max_tokens": request.max_tokens} for request in requests]
    prompts = [request.prompt for request in requests]
    done = llm.generate(prompts, each=each, temperature=0, ignore_eos=True, progress=False)
    tokens = sum(completion.num_output_tokens for completion in done)
    if tokens != sum(request.max_tokens for request in requests):
        raise Incomplete(f"{tokens} tokens offline")
    return tokens
