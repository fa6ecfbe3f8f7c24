"""Refusals of adapters that a worker cannot load at run time, before their files are read."""

from __future__ import annotations

from typing import Any

import pytest

from worker.config import WorkerConfig
from worker.serving.adapter_check import check_adapter


@pytest.mark.parametrize(
    ("settings", "source", "cause"),
    [
        ({"engine": "vllm"}, "x=org/y", "the engine vllm loads adapters only at its start"),
        ({}, "x=org/y", "worker.max_loaded_adapters is not set: workers load no adapters"),
        (
            {"max_loaded_adapters": 1},
            "x=/adapters/y",
            "worker.adapter_dir is not set: only hub ids are loaded at run time",
        ),
        (
            {"max_loaded_adapters": 1, "adapter_dir": "/adapters"},
            "x=adapters",
            "the directory of an adapter must be an absolute path below /adapters",
        ),
    ],
)
async def test_check_refuses_adapters_that_are_not_allowed(
    settings: dict[str, Any], source: str, cause: str
) -> None:
    answer = await check_adapter(WorkerConfig(model="org/model", **settings), source)
    assert (answer.error, answer.digest) == (cause, "")
