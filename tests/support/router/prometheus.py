"""Prometheus server that scrapes routers on this machine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.free_port import free_port
from tests.support.ledger.ledgers import found

_TIMEOUT_S = 30.0


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    async def query(self, expression: str) -> list[Any]:
        """Return the present results of a query; raise AssertionError if it is invalid."""
        query = urllib.parse.urlencode({"query": expression})
        return list((await self._get(f"/api/v1/query?{query}"))["data"]["result"])

    async def is_ready(self) -> bool:
        try:
            await asyncio.to_thread(_read, f"{self._url}/-/ready")
        except OSError:
            return False
        return True

    async def _get(self, path: str) -> Any:
        try:
            return json.loads(await asyncio.to_thread(_read, self._url + path))
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        return bytes(answer.read())


@asynccontextmanager
async def prometheus(directory: Path, targets: Sequence[str]) -> AsyncIterator[Prometheus]:
    """Run a server that scrapes ``targets`` every second as the job ``everlift``."""
    port = free_port()
    config = directory / "prometheus.yml"
    scrape = {"job_name": "everlift", "static_configs": [{"targets": list(targets)}]}
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(found("prometheus"), f"--config.file={config}"),
                *(f"--storage.tsdb.path={directory / 'data'}", "--log.level=warn"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=log,
            stdout=log,
        )
    try:
        server = Prometheus(port)
        async with asyncio.timeout(_TIMEOUT_S):
            while not await server.is_ready():
                assert process.poll() is None, (directory / "prometheus.log").read_text()
                await asyncio.sleep(0.1)
        yield server
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
