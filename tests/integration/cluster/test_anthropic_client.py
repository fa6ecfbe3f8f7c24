"""The anthropic package against a running cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cluster.test_openai_clients import check
from tests.support.router import chat_support
from tests.support.scripted import scripted_cluster


@pytest.mark.long
async def test_anthropic_client_is_served(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "caller", chat_support.HERMES) as parts:
        address = parts.routers[0].http_address
        await check(address, "anthropic_checks.py", EVERLIFT_MODEL="caller")
