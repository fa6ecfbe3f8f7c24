"""Pictures of the console of a serving cluster that scales out and loses a worker.

    python tests/support/router/console_picture.py [--out pictures/console.png] [--all DIR]

Ray Serve runs the fake model; three tenants send more requests than the first workers can serve.
``--out`` is a picture of the top of the page, for a README. ``--all`` is a folder for pictures of
the whole page: wide and narrow, dark and light.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Literal

from playwright.async_api import Browser, Page, expect

from cluster.autoscale.config import AutoscaleConfig
from cluster.config import Config
from cluster.ray.ray_cluster import RayCluster
from everlift.client.client import AsyncClient
from everlift.errors import EverliftError
from router.auth.caller import Scope
from router.config import RouterConfig
from tests.support.free_port import free_port
from tests.support.router.browser import browser, opened
from tests.support.router.keyring import Keyring
from worker.config import FakeModel, WorkerConfig

_TENANTS = ("atlas", "birch", "cobalt")
#: Requests per second of all tenants, and ranges of prompt and output lengths in tokens.
_RATE = 3.5
_PROMPT, _OUTPUT = (60, 900), (60, 420)
_TIMEOUT_MS = 60_000
#: Size of the page in CSS pixels: the README's column, at a device scale factor of 2.
_WIDTH, _HEIGHT, _MARGIN = 1000, 1240, 13
_THEMES: tuple[Literal["dark", "light"], ...] = ("dark", "light")


def config(state_dir: Path, keyring: Keyring) -> Config:
    return Config(
        model="fake",
        state_dir=state_dir,
        router=RouterConfig(
            port=free_port(),
            http_port=free_port(),
            chaos=True,
            access="file",
            access_file=str(keyring.path),
        ),
        worker=WorkerConfig(
            max_num_seqs=8,
            num_blocks=192,
            num_threads=1,
            chaos=True,
            fake=FakeModel(step_time=0.03, token_time=0.0002),
        ),
        autoscale=AutoscaleConfig(min_workers=2, max_workers=4),
    )


class Load:
    """Poisson arrivals of one tenant's requests, until cancelled."""

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self._client = client
        self._random = Random(seed)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as requests:
            number = 0
            while True:
                await asyncio.sleep(self._random.expovariate(_RATE / len(_TENANTS)))
                requests.create_task(self._ask(number))
                number += 1

    async def _ask(self, number: int) -> None:
        prompt = [self._random.randrange(1000) for _ in range(self._random.randint(*_PROMPT))]
        options = {"priority": self._random.choice((0, 0, 1)), "request_id": f"chat-{number}"}
        try:
            await self._client.generate(
                prompt, max_tokens=self._random.randint(*_OUTPUT), **options
            ).text()
        except EverliftError:
            return


async def take(out: Path, folder: Path | None) -> None:
    with TemporaryDirectory() as scratch:
        keyring = Keyring(Path(scratch) / "keys.yaml")
        ops = await keyring.key("ops", Scope.ADMIN, Scope.METRICS, Scope.INFER)
        keys = [await keyring.key(tenant) for tenant in _TENANTS]
        async with RayCluster(config(Path(scratch), keyring)) as cluster, browser() as chromium:
            clients = [AsyncClient(cluster.addresses, api_key=key) for key in keys]
            loads = [
                asyncio.create_task(Load(client, seed).run()) for seed, client in enumerate(clients)
            ]
            try:
                url = f"http://{cluster.http_addresses[0]}/console/"
                await _watch(chromium, url, ops, out, folder)
            finally:
                for load in loads:
                    load.cancel()
                await asyncio.gather(*loads, return_exceptions=True)
                for client in clients:
                    await client.close()


async def _watch(chromium: Browser, url: str, key: str, out: Path, folder: Path | None) -> None:
    window = {"width": _WIDTH, "height": _HEIGHT}
    async with opened(chromium, url, viewport=window, device_scale_factor=2) as page:
        await _enter(page, key)
        await expect(page.locator("#grid .cell")).to_have_count(4, timeout=_TIMEOUT_MS)
        await page.wait_for_timeout(20_000)
        await _kill(page)
        arrow = page.locator("#lanes-arrows path[data-cause=worker_lost]")
        await expect(arrow.nth(3)).to_be_attached(timeout=_TIMEOUT_MS)
        await page.wait_for_timeout(6_000)
        await _shoot(page, out)
        if folder is not None:
            await _look_up(page)
            await _all(page, folder)


async def _shoot(page: Page, out: Path) -> None:
    """Save a picture from the top of the page to the end of the lanes."""
    box = await page.locator("#fleet").bounding_box()
    scrolled = await page.evaluate("scrollY")
    assert box is not None
    height = box["y"] + scrolled + box["height"] + _MARGIN
    await page.screenshot(
        path=out, full_page=True, clip={"x": 0, "y": 0, "width": _WIDTH, "height": height}
    )


async def _enter(page: Page, key: str) -> None:
    await page.fill("#key", key)
    await page.press("#key", "Enter")
    await expect(page.locator("#connection")).to_have_text("live")


async def _kill(page: Page) -> None:
    """Kill the first worker that has lanes."""
    await page.select_option("#chaos-target", index=4)
    await page.click("#chaos-form button")
    await page.click("#confirm button[value=yes]")


async def _look_up(page: Page) -> None:
    """Look up a request that was migrated."""
    event_text = await page.locator("#happened li[data-kind=migrated]").first.inner_text()
    name = next(word for word in event_text.split() if "/" in word)
    await page.fill("#request-id", name)
    await page.press("#request-id", "Enter")
    await expect(page.locator("#request-answer")).to_contain_text("Attempts")


async def _all(page: Page, folder: Path) -> None:
    for theme in _THEMES:
        await page.emulate_media(color_scheme=theme)
        for width, height in ((1440, 900), (390, 844)):
            await page.set_viewport_size({"width": width, "height": height})
            await page.wait_for_timeout(1_500)
            await page.screenshot(path=folder / f"{theme}-{width}.png", full_page=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("pictures/console.png"))
    parser.add_argument("--all", type=Path, dest="folder")
    args = parser.parse_args(arguments)
    asyncio.run(take(args.out, args.folder))


if __name__ == "__main__":
    main()
