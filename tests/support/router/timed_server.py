"""OpenAI-compatible endpoint with exact times of tokens.

The first token of every stream arrives ``ttft_s`` after its request, and each further one ``gap_s``
later, under any number of streams.

    python -m tests.support.router.timed_server --ttft-ms 80 --gap-ms 12 --port 8123
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "timed"
_DEFAULT_TOKENS = 16


@dataclass
class TimedServer:
    """Endpoint with exact times of tokens.

    ``asked`` has the headers and bodies of the requests. With ``counts``, streams end with their
    usage. The next ``refusals`` requests are refused, as by a full queue.
    """

    ttft_s: float = 0.0
    gap_s: float = 0.0
    counts: bool = True
    refusals: int = 0
    asked: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, lambda text: {"text": text}, "text_completion")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(
            request, lambda text: {"delta": {"content": text}}, "chat.completion.chunk"
        )

    async def _answer(self, request: web.Request, said: Any, kind: str) -> web.StreamResponse:
        began = asyncio.get_running_loop().time()
        body = await request.json()
        self.asked.append((dict(request.headers), body))
        if self.refusals:
            self.refusals -= 1
            error = {"code": "queue_full", "message": "try again later"}
            return web.json_response({"error": error}, status=429)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        tokens = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_TOKENS
        for number in range(tokens):
            await _until(began + self.ttft_s + number * self.gap_s)
            is_last = number == tokens - 1
            choice = {
                "index": 0,
                "finish_reason": "length" if is_last else None,
                **said(f" t{number}"),
            }
            await response.write(_event(kind, [choice]))
        if self.counts:
            await response.write(_event(kind, [], _usage(body, tokens)))
        await response.write(b"data: [DONE]\n\n")
        return response


async def _until(moment: float) -> None:
    loop = asyncio.get_running_loop()
    while (early := moment - loop.time()) > 0:
        await asyncio.sleep(early)


def _usage(body: dict[str, Any], tokens: int) -> dict[str, int]:
    prompt = body.get("prompt") or body["messages"][-1]["content"]
    read = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    return {
        "prompt_tokens": read,
        "completion_tokens": tokens,
        "total_tokens": read + tokens,
    }


def _event(kind: str, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
    chunk: dict[str, Any] = {
        "id": "t",
        "object": kind,
        "created": 0,
        "model": MODEL,
        "choices": choices,
    }
    if usage is not None:
        chunk["usage"] = usage
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@asynccontextmanager
async def serving(server: TimedServer, port: int = 0) -> AsyncIterator[str]:
    """Run the server; yield its address in the form that OpenAI's clients use."""
    runner = web.AppRunner(server.app())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        host, found = runner.addresses[0][:2]
        yield f"http://{host}:{found}/v1"
    finally:
        await runner.cleanup()


async def _serve_for_ever(server: TimedServer, port: int) -> None:
    async with serving(server, port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ttft-ms", type=float, default=80.0)
    parser.add_argument("--gap-ms", type=float, default=12.0)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    server = TimedServer(options.ttft_ms / 1e3, options.gap_ms / 1e3)
    asyncio.run(_serve_for_ever(server, options.port))


if __name__ == "__main__":
    main()
