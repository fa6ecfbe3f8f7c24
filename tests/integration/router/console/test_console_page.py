"""The console page in a real browser: display, interaction and accessibility."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Request, Route, expect

from everlift.client.client import AsyncClient
from everlift.v1.session_pb2 import Scaling, ScalingChange
from router.auth.caller import Scope
from router.console import console, prompts
from tests.conftest import leaving_nothing
from tests.support.example_counts import examples
from tests.support.in_process import ROUTER, WORKER, Cluster, cluster
from tests.support.router.browser import browser, opened, violations
from tests.support.router.chat_support import HERMES
from tests.support.router.keyring import Keyring
from tests.support.scripted import scripted_cluster
from worker.config import FakeModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Directory for screenshots, if any are wanted.
PICTURES = os.environ.get("CONSOLE_PICTURES")
THEMES: tuple[Literal["dark", "light"], ...] = ("dark", "light")
WINDOWS = ((1440, 900), (390, 844))
#: Pairs of theme and window size; `make test` tries each theme and each size once.
LOOKS = (
    [*product(THEMES, WINDOWS)] if examples(100) >= 100 else [*zip(THEMES, WINDOWS, strict=True)]
)
#: Slow steps, so that requests outlast a test.
SLOW = replace(WORKER, max_num_seqs=8, fake=FakeModel(step_time=0.02))


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """Check once for the whole module that no resources leak.

    The tests share a browser, which starts and ends processes during a test.
    """
    with leaving_nothing():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium(nothing_left: None) -> AsyncIterator[Browser]:
    async with browser() as chromium:
        yield chromium


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers poll the ledger and each other every 0.1 s instead of every second."""
    monkeypatch.setattr(console, "_POLL_INTERVAL_S", 0.1)


@pytest_asyncio.fixture(loop_scope="module")
async def parts() -> AsyncIterator[Cluster]:
    async with cluster(1, 2, replace(ROUTER, chaos=True), SLOW) as parts:
        yield parts


def url_of(parts: Cluster) -> str:
    return f"http://{parts.routers[0].http_address}/console/"


@pytest.fixture
def url(parts: Cluster) -> str:
    return url_of(parts)


class Load:
    """Client whose requests run until the context exits."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Load:
        self._client = await self._stack.enter_async_context(AsyncClient(self._address))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def begin(self, name: str, **options: Any) -> None:
        options = {"max_tokens": 3000} | options
        stream = self._client.generate([7] * 60, request_id=name, **options)
        await anext(aiter(await self._stack.enter_async_context(stream)))


async def check_readable(page: Page, name: str, part: str = "") -> None:
    """Check a page with axe in each of LOOKS; it must not be wider than the window."""
    for theme, (width, height) in LOOKS:
        await page.emulate_media(color_scheme=theme)
        await page.set_viewport_size({"width": width, "height": height})
        assert await violations(page) == [], (name, theme, width)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        if PICTURES:
            path = Path(PICTURES) / f"{name}-{theme}-{width}.png"
            shown = page.locator(part).screenshot if part else page.screenshot
            await shown(path=path, **({} if part else {"full_page": True}))


@pytest.mark.long
async def test_page_shows_migration_of_streamed_request(
    chromium: Browser,
) -> None:
    async with cluster(1, 2) as parts, opened(chromium, url_of(parts)) as page:
        held = parts.hold()
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#key-form"), "nobody asks for a key").to_be_hidden()
        await page.fill("#max-tokens", "200")
        await page.fill("#prompt", "Once upon a time")
        await page.click("#try-start")
        for each in held:
            each.let(20)
        await expect(page.locator("#try-status")).to_contain_text("streaming")
        await page.click("#seats-details summary")
        seat = page.locator("#seats tr")
        await expect(seat).to_have_count(1)
        worker, _, phase, name, _ = await seat.locator("td").all_inner_texts()
        assert phase == "decode" and name
        [rank] = [it for it in parts.workers if it.worker_id.startswith(worker)]
        lost = held.pop(parts.workers.index(rank))
        killing = asyncio.create_task(parts.kill_worker(rank))
        await expect(page.locator("#grid .cell[data-state=lost]")).to_have_count(1)
        lost.release()
        await killing
        # An arrow between the lanes, and an entry in the event list.
        arrow = page.locator("#lanes-arrows path.migrated")
        await expect(arrow).to_have_attribute("data-cause", "worker_lost")
        event = page.locator("#happened li[data-kind=migrated]")
        await expect(event).to_contain_text(f"{name} migrated from worker {worker}")
        # Announcement for screen readers.
        await expect(page.locator("#news")).to_contain_text("migrated")
        # A lost worker cannot be selected for draining.
        offered = page.locator("#drain-worker option")
        await expect(offered).to_have_count(1)
        assert await offered.get_attribute("value") != rank.worker_id
        # No token is lost.
        held[0].release()
        await expect(page.locator("#try-status")).to_contain_text("200 tokens in", timeout=20_000)
        await page.get_by_role("button", name="Look up unnamed").click()
        answer = page.locator("#request-answer")
        await expect(answer).to_contain_text("finished")
        await expect(answer).to_contain_text("200")
        await expect(answer).to_contain_text("was lost")
        await expect(answer).to_contain_text("to store it")
        # The time breakdown is listed by attempt.
        spans = page.get_by_role("region", name="Time breakdown")
        await expect(spans).to_contain_text("decode (attempt 2)")
        attempts = page.get_by_role("region", name="Attempts").locator("tbody tr")
        await expect(attempts).to_have_count(2)
        await expect(attempts.last).to_contain_text("finished")
        await check_readable(page, "lost")


@pytest.mark.long
async def test_page_shows_preempted_request_resuming(chromium: Browser) -> None:
    """The KV cache holds fewer tokens than the three requests need."""
    crowded = replace(WORKER, max_num_seqs=3, num_blocks=64)
    async with (
        cluster(1, 1, ROUTER, crowded) as parts,
        opened(chromium, url_of(parts)) as page,
        Load(parts.address) as load,
    ):
        await expect(page.locator("#connection")).to_have_text("live")
        for number in range(3):
            await load.begin(f"r{number}".ljust(128, "x"), min_tokens=1000, max_tokens=1000)
        arrow = page.locator("#lanes-arrows path.resumed").first
        await expect(arrow).to_be_attached(timeout=60_000)
        await expect(arrow).to_have_attribute("data-cause", "preempted")
        # Long names do not overflow the list.
        happened = page.locator("#happened")
        await expect(happened.locator("[data-kind=resumed]").first).to_contain_text("xxx")
        assert await happened.evaluate("list => list.scrollWidth <= list.clientWidth")


async def test_page_is_accessible_in_every_theme_and_width(
    parts: Cluster, url: str, chromium: Browser
) -> None:
    async with Load(parts.address) as load:
        for number in range(12):
            await load.begin(f"story-{number}", priority=number % 3)
        async with opened(chromium, url) as page:
            await page.fill("#request-id", "story-3")
            await page.press("#request-id", "Enter")
            answer = page.locator("#request-answer")
            await expect(answer).to_contain_text("running")
            await expect(answer).to_contain_text("arrived at the worker during attempt 1: story-")
            await page.click("#seats-details summary")
            await expect(page.locator("#seats tr")).to_have_count(12)
            await expect(page.locator("#percentiles tr")).to_have_count(5)
            hits = page.locator("#tiles > div", has_text="Prefix-cache hits")
            await expect(hits.locator("dd")).to_contain_text("tokens in 5")
            await check_readable(page, "console")


@pytest.mark.long
async def test_page_shows_autoscaler_decisions_with_reasons(
    parts: Cluster, url: str, chromium: Browser
) -> None:
    async with opened(chromium, url) as page:
        line, changes = page.locator("#scaling-line"), page.locator("#scalings tr")
        await expect(line).to_have_text("No autoscaler: the number of workers is fixed.")
        change = ScalingChange(ago_s=30.0, before=1, workers=3, reason="requests would wait 7.0 s")
        await parts.ledger.put_scaling(
            Scaling(workers=3, max_workers=8, need=2.5, reason="enough", changes=[change])
        )
        await expect(line).to_contain_text("3 workers wanted, at most 8: enough.")
        await expect(changes).to_have_count(1)
        await expect(changes).to_contain_text("1 → 3requests would wait 7.0 s")


@pytest.mark.long
async def test_page_lists_recent_requests_and_opens_clicked_one(
    parts: Cluster, url: str, chromium: Browser
) -> None:
    async with Load(parts.address) as load, opened(chromium, url) as page:
        for number in range(3):
            await load.begin(f"story-{number}", priority=number % 3)
        rows = page.locator("#recent-rows tr")
        names = rows.locator("button")
        await expect(names.filter(has_text="story-")).to_have_count(3)
        # Newest first.
        await expect(names.first).to_have_text("story-2")
        await expect(rows.first).to_contain_text("running")
        await page.get_by_role("button", name="story-1").click()
        await expect(page.locator("#request-id")).to_have_value("story-1")
        await expect(page.locator("#request-answer")).to_contain_text("story-1")


@pytest.mark.long
async def test_page_bar_width_matches_value(parts: Cluster, url: str, chromium: Browser) -> None:
    async with Load(parts.address) as load:
        for number in range(12):
            await load.begin(f"story-{number}")
        async with opened(chromium, url) as page:
            bars = page.locator("#tiles [role=progressbar]")
            await expect(bars).to_have_count(2)
            slots = bars.first
            await expect(slots).not_to_have_attribute("aria-valuenow", "0")
            filled = await slots.evaluate(
                "bar => { const width = (it) => it.getBoundingClientRect().width;"
                " return [+bar.ariaValueNow, (100 * width(bar.firstChild)) / width(bar)]; }"
            )
            assert filled[0] == pytest.approx(filled[1], abs=1.0)
            # An empty bar has width 0.
            await slots.evaluate("bar => { bar.firstChild.style.width = '0%' }")
            width = await slots.evaluate("bar => bar.firstChild.getBoundingClientRect().width")
            assert width == 0


async def test_page_collapses_empty_cards(url: str, chromium: Browser) -> None:
    async with opened(chromium, url) as page:
        await expect(page.locator("#latencies-of")).to_have_text("No requests yet.")
        for part in ("latencies-measured", "queue-chart", "by-class", "scalings-table", "recent"):
            await expect(page.locator(f"#{part}")).to_be_hidden()
        for card in ("queue", "latencies", "scaling"):
            box = await page.locator(f"#{card}").bounding_box()
            assert box is not None and box["height"] < 120


async def test_page_chat_keeps_history_and_system_prompt(chromium: Browser, tmp_path: Path) -> None:
    started = scripted_cluster(tmp_path / "m", HERMES)
    async with started as parts, opened(chromium, url_of(parts)) as page:
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#as-chat")).to_be_checked()
        sent: list[dict[str, Any]] = []
        page.on("request", lambda request: _note_body(request, sent))
        await page.fill("#system", "be brief")
        for prompt, answer in (
            ("say:hello there", "hello there"),
            ("say:<b>bye</b>", "<b>bye</b>"),
        ):
            await page.fill("#prompt", prompt)
            await page.press("#prompt", "Enter")
            await expect(page.locator(".turn.model .words").last).to_have_text(answer)
            await expect(page.locator("#try-status")).to_contain_text("tokens in")
        await expect(page.locator(".turn")).to_have_count(4)
        await expect(page.locator("#prompt")).to_have_value("")
        assert [message["content"] for message in sent[-1]["messages"]] == [
            *("be brief", "say:hello there", "hello there", "say:<b>bye</b>"),
        ]
        await check_readable(page, "chat", "#try")
        await page.click("#try-clear")
        await expect(page.locator(".turn")).to_have_count(0)
        await page.fill("#system", "")
        await page.fill("#prompt", "say:again")
        await page.press("#prompt", "Shift+Enter")
        await expect(page.locator(".turn"), "a new line sends nothing").to_have_count(0)
        await page.click("#try-start")
        await expect(page.locator(".turn.model .words")).to_have_text("again")
        assert [message["role"] for message in sent[-1]["messages"]] == ["user"]


@pytest.mark.long
async def test_page_chat_shows_reasoning(chromium: Browser, tmp_path: Path) -> None:
    reasoning = replace(ROUTER, reasoning_format="think")
    started = scripted_cluster(tmp_path / "m", HERMES, router_config=reasoning)
    async with started as parts, opened(chromium, url_of(parts)) as page:
        await expect(page.locator("#connection")).to_have_text("live")
        sent: list[dict[str, Any]] = []
        page.on("request", lambda request: _note_body(request, sent))
        await page.fill("#prompt", "say:<think>two and two</think>four")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".turn.model .words")).to_have_text("four")
        await expect(page.locator(".turn.model .thoughts")).to_have_text("two and two")
        await page.fill("#prompt", "say:five")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".turn.model .words").last).to_have_text("five")
        await expect(page.locator(".turn.model .thoughts").last).to_be_hidden()
        assert [it["content"] for it in sent[-1]["messages"]][1] == "four"


def _note_body(request: Request, sent: list[dict[str, Any]]) -> None:
    if request.url.endswith("/v1/chat/completions"):
        sent.append(request.post_data_json)


@pytest.mark.long
async def test_page_prompt_without_template_is_single_and_stoppable(
    parts: Cluster, url: str, chromium: Browser
) -> None:
    async with opened(chromium, url) as page:
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#as-chat")).not_to_be_checked()
        await expect(page.locator("#system-field")).to_be_hidden()
        await expect(page.locator("#chat-hint")).to_contain_text("continues the text")
        await page.fill("#max-tokens", "3000")
        await page.fill("#prompt", "Once upon a time")
        await page.click("#try-start")
        await expect(page.locator("#try-status")).to_contain_text("streaming")
        await expect(page.locator("#try-start")).to_be_hidden()
        await page.click("#try-stop")
        await expect(page.locator(".turn.model p")).to_contain_text("stopped")
        await expect(page.locator("#try-start")).to_be_visible()
        # A rejected prompt can be edited.
        await page.check("#as-chat")
        await expect(page.locator(".turn")).to_have_count(0)
        await page.fill("#prompt", "hello")
        await page.click("#try-start")
        await expect(page.locator(".turn.model .problem")).to_contain_text("no_chat_template")
        await expect(page.locator("#prompt")).to_have_value("hello")


async def test_page_escapes_untrusted_text(parts: Cluster, url: str, chromium: Browser) -> None:
    markup = "<img src=x onerror=alert(1)>"
    change = ScalingChange(ago_s=1.0, before=1, workers=2, reason=markup)
    await parts.ledger.put_scaling(Scaling(workers=2, reason=markup, changes=[change]))
    async with opened(chromium, url) as page:
        await expect(page.locator("#scaling-line")).to_contain_text(markup)
        await expect(page.locator("#scalings")).to_contain_text(markup)
        await page.fill("#request-id", markup)
        await page.press("#request-id", "Enter")
        await expect(page.locator("#request-answer")).to_contain_text("invalid_request")
        await expect(page.locator("main img")).to_have_count(0)
        await check_readable(page, "refused")


async def test_page_opens_request_from_table_by_keyboard(
    parts: Cluster, url: str, chromium: Browser
) -> None:
    async with Load(parts.address) as load:
        await load.begin("story")
        async with opened(chromium, url) as page:
            await page.focus("#seats-details summary")
            await page.keyboard.press("Enter")
            name, age = page.locator("#seats button"), page.locator("#seats td").last
            await expect(name).to_have_text("story")
            await name.focus()
            # Updates every second leave the focus in place.
            been = await age.inner_text()
            await expect(age).not_to_have_text(been)
            await expect(name).to_be_focused()
            await page.keyboard.press("Enter")
            await expect(page.locator("#request-answer")).to_contain_text("running")


@pytest.mark.long
async def test_page_ignores_late_response_to_earlier_lookup(url: str, chromium: Browser) -> None:
    late = asyncio.Event()

    async def hold(route: Route) -> None:
        await late.wait()
        await route.continue_()

    async with opened(chromium, url) as page:
        await page.route("**/requests/first", hold)
        for name in ("first", "second"):
            await page.fill("#request-id", name)
            await page.click("#request-form button")
        answer = page.locator("#request-answer")
        await expect(answer).to_contain_text("no request second")
        async with page.expect_response("**/requests/first"):
            late.set()
        await page.evaluate("new Promise((resolve) => setTimeout(resolve))")
        await expect(answer).to_contain_text("no request second")


@pytest.mark.long
async def test_page_selects_workers_by_keyboard(
    parts: Cluster, url: str, chromium: Browser
) -> None:
    first, second = sorted(rank.worker_id for rank in parts.workers)
    async with opened(chromium, url) as page:
        await expect(page.locator("#grid .cell")).to_have_count(2)
        await page.locator("#grid .cell").first.focus()
        await expect(page.locator("#worker-line")).to_contain_text(f"worker {first[:8]}")
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#worker-line")).to_contain_text(f"worker {second[:8]}")
        await page.keyboard.press("Space")
        chosen = page.locator("#grid .cell[aria-selected=true]")
        await expect(chosen).to_have_count(1)
        await expect(page.locator("#lanes-text")).to_contain_text("1 workers shown")
        await page.click("#lanes-reset")
        await expect(chosen).to_have_count(2)


@pytest.mark.long
async def test_page_clears_worker_details_when_worker_leaves(
    parts: Cluster, url: str, chromium: Browser
) -> None:
    first = min(parts.workers, key=lambda rank: rank.worker_id)
    async with opened(chromium, url) as page:
        await expect(page.locator("#grid .cell")).to_have_count(2)
        await page.locator("#grid .cell").first.focus()
        await expect(page.locator("#worker-line")).to_contain_text(first.worker_id[:8])
        await parts.drain_worker(first)
        # The worker's announcement expires after a while.
        await expect(page.locator("#grid .cell")).to_have_count(1, timeout=30_000)
        await expect(page.locator("#worker-line")).to_have_text("")


@pytest.mark.long
async def test_page_policy_reset_discards_unsaved_input(url: str, chromium: Browser) -> None:
    async with opened(chromium, url) as page:
        ageing_factor = page.locator("#policy-ageing_factor")
        held = await ageing_factor.input_value()
        await ageing_factor.fill("9")
        await page.select_option("#policy-order", "hrrn")
        await page.click("#policy-reset")
        await expect(page.locator("#admin-status")).to_have_text(
            "policy reset to the configuration"
        )
        await expect(ageing_factor).to_have_value(held)
        await expect(page.locator("#policy-order")).to_have_value("fifo")
        # An empty field is invalid.
        await ageing_factor.fill("")
        await page.click("#policy-form button[type=submit]")
        assert await ageing_factor.evaluate("input => input.validity.valueMissing")
        await expect(page.locator("#admin-status")).to_have_text(
            "policy reset to the configuration"
        )


async def test_page_shows_changes_that_arrived_while_hidden(url: str, chromium: Browser) -> None:
    hide = """is => {
        Object.defineProperty(document, "hidden", {get: () => is, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    async with opened(chromium, url) as page:
        line = page.locator("#queue-line")
        await expect(line).to_contain_text("order fifo")
        await page.evaluate(hide, True)
        await page.select_option("#policy-order", "hrrn")
        await page.click("#policy-form button[type=submit]")
        # This form is updated from the same section as the line, also while the page is hidden.
        label = page.locator("label[for=policy-order]")
        await expect(label).to_have_class("overridden")
        await expect(line).to_contain_text("order fifo")
        await page.evaluate(hide, False)
        assert "order hrrn" in await line.inner_text()


async def test_page_event_stream_skips_comments_and_cancels_body(
    url: str, chromium: Browser
) -> None:
    read = """async () => {
        const { events } = await import(new URL("api.js", document.baseURI));
        const text = new TextEncoder().encode(": keep-alive\\n\\ndata: 1\\n\\n");
        let cancel;
        const isCancelled = new Promise((resolve) => (cancel = () => resolve(true)));
        const start = (controller) => controller.enqueue(text);
        const answer = new Response(new ReadableStream({ start, cancel }));
        let first;
        for await (first of events(answer)) break;
        const isLate = new Promise((resolve) => setTimeout(resolve, 1000, false));
        return [first, await Promise.race([isCancelled, isLate])];
    }"""
    async with opened(chromium, url) as page:
        assert await page.evaluate(read) == [["message", "1"], True]


@pytest.mark.long
async def test_page_names_missing_workers_without_drain_estimate(chromium: Browser) -> None:
    async with cluster(1, 0) as parts, opened(chromium, url_of(parts)) as page:
        parts.routers[0].reconfigure(ROUTER, {}, {"fake": 1})
        parts.routers[0].place("ray", {"fake": (1, "no node with 1 GPU is free")})
        missing = "Workers: 0 of 1 ready; 1 pending placement: no node with 1 GPU is free"
        await expect(page.locator("#missing-workers")).to_have_text(missing)
        line = page.locator("#queue-line")
        # The page handles clicks once it shows the queue.
        await expect(line).to_contain_text("0 queued")
        await page.fill("#prompt", "Once upon a time")
        await page.click("#try-start")
        await expect(line).to_contain_text("drain time unknown.")
        await expect(line).not_to_contain_text("A saturated worker")
        await page.locator("#recent-rows button").first.click()
        await expect(page.locator("#request-answer .warning")).to_have_text(f"{missing}.")
        await page.click("#try-stop")
        await expect(page.locator("#try-status")).to_have_text("stopped")


@pytest.mark.long
async def test_page_operator_sets_policy_drains_and_injects_fault(
    parts: Cluster, url: str, chromium: Browser
) -> None:
    first, second = sorted(rank.worker_id for rank in parts.workers)
    async with opened(chromium, url) as page:
        await page.select_option("#policy-order", "hrrn")
        await page.click("#policy-form button[type=submit]")
        await expect(page.locator("#admin-status")).to_have_text("policy set")
        await expect(page.locator("#queue-line")).to_contain_text("order hrrn")
        await expect(page.locator("#happened")).to_contain_text("policy: order hrrn")
        await page.select_option("#policy-engine_policy", "slai")
        await page.click("#policy-form button[type=submit]")
        await expect(page.locator("#happened")).to_contain_text("policy: engine_policy slai")
        await page.select_option("#drain-worker", first)
        await page.click("#drain-form button")
        await check_readable(page, "confirm")
        await page.click("#confirm button[value=no]")
        await page.click("#drain-form button")
        await page.click("#confirm button[value=yes]")
        await expect(page.locator("#grid .cell[data-state=draining]")).to_have_count(1)
        await page.select_option("#chaos-kind", "FAULT_KIND_SLOW")
        await page.select_option("#chaos-target", second)
        await page.fill("#chaos-seconds", "0.5")
        await page.click("#chaos-form button")
        await page.click("#confirm button[value=yes]")
        await expect(page.locator("#admin-status")).to_contain_text("slow: under way")
        await check_readable(page, "draining")


async def test_page_requests_key_and_stores_it_in_session_only(
    chromium: Browser, tmp_path: Path
) -> None:
    keyring = Keyring(tmp_path / "keys.yaml")
    key = await keyring.key("acme", Scope.INFER, Scope.METRICS)
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    async with cluster(1, 1, config) as parts:
        async with opened(chromium, url_of(parts)) as page:
            connection = page.locator("#connection")
            await expect(connection).to_contain_text("an API key is required")
            await check_readable(page, "key")
            await page.fill("#key", key)
            await page.press("#key", "Enter")
            await expect(connection).to_have_text("live")
            await expect(page.locator("#admin")).to_be_hidden()
            await page.fill("#max-tokens", "3")
            await page.fill("#prompt", "Once upon a time")
            await page.click("#try-start")
            await expect(page.locator("#try-status")).to_contain_text("3 tokens in")
            kept = await page.evaluate(
                "[localStorage.length, document.cookie, ...Object.values(sessionStorage)]"
            )
            assert kept == [0, "", key]
            await page.reload()
            await expect(connection).to_have_text("live")


@pytest.mark.long
async def test_page_shows_cached_prompt_tokens_by_worker_and_tenant(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first frame takes a snapshot with the worker, however recent the previous one is.
    monkeypatch.setattr(prompts, "_INTERVAL_S", 0.0)
    keyring = Keyring(tmp_path / "keys.yaml")
    ops = await keyring.key("ops", Scope.ADMIN)
    acme, other = await keyring.key("acme", Scope.INFER, Scope.METRICS), await keyring.key("other")
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    async with cluster(1, 1, config) as parts:
        url, [worker] = url_of(parts), parts.workers
        async with opened(chromium, url) as page:
            await page.fill("#key", ops)
            await page.press("#key", "Enter")
            line = page.locator("#prompts-line")
            await expect(line).to_have_text("No prompts in the last five minutes.")
            await expect(page.locator("#by-worker-prompts")).to_be_hidden()
            await expect(page.locator("#by-tenant-prompts")).to_be_hidden()
            for key, count in ((acme, 2), (other, 1)):
                async with AsyncClient(parts.address, api_key=key) as client:
                    for _ in range(count):
                        await client.generate([7] * 300, max_tokens=3).text()
            # The worker has nine blocks of 32 tokens of acme's second prompt.
            await expect(line).to_contain_text("32 % of 900 prompt tokens")
            workers = page.locator("#by-worker-prompts tbody tr")
            await expect(workers).to_have_text([re.compile(f"^{worker.worker_id[:8]}90032 %")])
            tenants = page.locator("#by-tenant-prompts tbody tr")
            await expect(tenants).to_have_text(
                [re.compile("^acme60048 %"), re.compile("^other3000 %")]
            )
            await page.locator("#grid .cell").focus()
            worker_line = page.locator("#worker-line")
            await expect(worker_line).to_contain_text(
                "32 % of prompt tokens cached in the last 5 min"
            )
            await check_readable(page, "prompts", "#prompts")
            await page.fill("#key", acme)
            await page.press("#key", "Enter")
            await expect(tenants).to_have_text([re.compile("^acme60048 %")])


@pytest.mark.long
async def test_page_reopens_broken_feed(parts: Cluster, url: str, chromium: Browser) -> None:
    async with opened(chromium, url) as page:
        connection = page.locator("#connection")
        await expect(connection).to_have_text("live")
        [uvicorn_connection] = [
            it
            for it in parts.routers[0]._http._state.connections
            if it.cycle is not None and not it.cycle.response_complete
        ]
        uvicorn_connection.transport.abort()
        await expect(connection).not_to_have_text("live")
        await expect(connection).to_have_text("live")
