"""Stopwatch at a router's APIs, from a call's arrival until its last answer is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.http.writer import Writer
from router.api.http2 import Call
from router.api.http_api import Api
from router.api.service import IDEMPOTENCY_KEY
from router.event_loop import now

Headers = Iterable[tuple[str | bytes, str | bytes]]


class Rim:
    """Times of calls to routers that start from now on, by the calls' idempotency keys.

    ``arrivals`` has the times of arrival, ``seconds`` the durations.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.arrivals: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self._time_http(patch)
        self._time_grpc(patch)

    def _arrived(self, headers: Headers) -> None:
        self.arrivals[_name(headers)] = now()

    def _answered(self, headers: Headers) -> None:
        name = _name(headers)
        self.seconds[name] = now() - self.arrivals[name]

    def _time_http(self, patch: pytest.MonkeyPatch) -> None:
        app_of, write = Api.app, Writer.write

        def timed_write(writer: Writer, data: bytes) -> None:
            self._answered(writer.cycle.scope["headers"])
            write(writer, data)

        patch.setattr(Api, "app", lambda api, *args: self._timed(app_of(api, *args)))
        patch.setattr(Writer, "write", timed_write)

    def _timed(self, app: ASGIApp) -> ASGIApp:
        async def timed(scope: Scope, receive: Receive, send: Send) -> None:
            async def timed_send(message: Message) -> None:
                if message.get("body"):
                    self._answered(scope["headers"])
                await send(message)

            self._arrived(scope["headers"])
            await app(scope, receive, timed_send)

        return timed

    def _time_grpc(self, patch: pytest.MonkeyPatch) -> None:
        run, put = Call.run, Call._enqueue

        def timed_run(call: Call, handler: Any) -> None:
            self._arrived(call.invocation_metadata())
            run(call, handler)

        def timed_put(call: Call, answer: Any) -> None:
            self._answered(call.invocation_metadata())
            put(call, answer)

        patch.setattr(Call, "run", timed_run)
        patch.setattr(Call, "_enqueue", timed_put)


def _name(headers: Headers) -> str:
    named = {_text(name): _text(value) for name, value in headers}
    return named.get(IDEMPOTENCY_KEY, "")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
