"""Headless Chromium of Debian, driven by Playwright."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from tests.support.ledger.ledgers import found

# The page is drawn late on a busy machine.
expect.set_options(timeout=30_000)

_AXE = Path(__file__).parents[2] / "axe" / "axe.min.js"
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Run Chromium; without it skip the test, or fail it in CI."""
    path = found("chromium")
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=path, args=[*_FLAGS])
        try:
            yield chromium
        finally:
            await chromium.close()


@asynccontextmanager
async def opened(chromium: Browser, url: str, **options: Any) -> AsyncIterator[Page]:
    """Open ``url`` in a page; fail on errors and on requests to other origins."""
    wrong: list[str] = []
    context = await chromium.new_context(**options)
    page = await context.new_page()
    origin = url.partition("/console")[0]
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if _is_wrong(said) else None)
    page.on(
        "request",
        lambda request: None if request.url.startswith(origin) else wrong.append(request.url),
    )
    try:
        await page.goto(url)
        yield page
        assert not wrong, wrong
    finally:
        await context.close()


def _is_wrong(said: ConsoleMessage) -> bool:
    """Return whether a message is an error; failed loads are shown by the page itself."""
    return said.type == "error" and "Failed to load resource" not in said.text


async def violations(page: Page) -> list[str]:
    """Return the axe rules that the page violates, with the elements.

    Axe is evaluated by the browser, because the page's policy admits only its own scripts.
    """
    await page.evaluate(_AXE.read_text())
    found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{it['id']}: {[node['html'][:120] for node in it['nodes']]}" for it in found["violations"]
    ]
