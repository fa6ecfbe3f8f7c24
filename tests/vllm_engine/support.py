"""Helpers of the tests of clusters whose workers run vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cluster.llm.completion import gather
from everlift.client.client import AsyncClient

#: Interpreter of vLLM's environment; empty outside of make test-vllm.
PYTHON = os.environ.get("EVERLIFT_VLLM_PYTHON", "")
LENGTH = 200
#: Tokens and finish reason of each choice.
Result = tuple[tuple[tuple[int, ...], object], ...]


async def generate(client: AsyncClient, number: int, models: tuple[str, ...] = ("",)) -> Result:
    """Return the result of a request; half of them are greedy, and some have stops or choices."""
    options: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"seed": number}
    if number % 8 == 2:
        options["n"] = 2
    if number % 8 in (2, 3):
        options["stop"] = [f"{number + 20}:", "00"]
    options["model"] = models[number // 2 % len(models)]
    stream = client.generate(
        f"count from {number} to 400:", max_tokens=LENGTH, frequency_penalty=0.1, **options
    )
    choices = (await gather(stream)).choices
    return tuple((choice.token_ids, choice.finish_reason) for choice in choices)


def vllm_processes(pid: int) -> list[int]:
    """Return the process ids of vLLM's own processes below the rank ``pid``."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for each in children for child in each.read_text().split()]
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_text().startswith("VLLM::")]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
