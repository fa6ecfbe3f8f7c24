"""Contract of the worker's engines: Everlift's own, and vLLM's with a fake core."""

from __future__ import annotations

import pytest

from tests.support.worker.engine_contract import EngineContract
from tests.support.worker.fake_vllm_core import FakeCore
from tests.support.worker.worker_support import engine as own_engine
from tests.support.worker.worker_support import limits
from worker.engine.adapter import EngineAdapter
from worker.vllm_engine.engine import VllmEngine

LARGE, SMALL = limits(num_blocks=64), limits(num_blocks=10)


class TestOwnEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> EngineAdapter:
        return own_engine(LARGE)

    @pytest.fixture
    def small(self) -> EngineAdapter:
        return own_engine(SMALL)


class TestVllmEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> EngineAdapter:
        return VllmEngine(FakeCore(LARGE), LARGE)

    @pytest.fixture
    def small(self) -> EngineAdapter:
        return VllmEngine(FakeCore(SMALL), SMALL)
