"""A stopwatch where a router's clients come in: from when a call is heard of to the last that is
said to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.clock import now
from router.gateway.headers import IDEMPOTENCY_KEY
from router.gateway.http.api import Api
from router.rpc.call import Call


class Rim:
    """Of routers that start from now on, by the names that calls give in their headers: whether
    they were heard, and the ``seconds`` that they took."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.heard: set[str] = set()
        self.seconds: dict[str, float] = {}
        self._time_http(patch)
        self._time_grpc(patch)

    def _time_http(self, patch: pytest.MonkeyPatch) -> None:
        app_of = Api.app
        patch.setattr(Api, "app", lambda api, *args: self._timed(app_of(api, *args)))

    def _timed(self, app: ASGIApp) -> ASGIApp:
        async def timed(scope: Scope, receive: Receive, send: Send) -> None:
            began, name = now(), _name(scope["headers"])
            self.heard.add(name)

            async def tell(message: Message) -> None:
                self.seconds[name] = now() - began
                await send(message)

            await app(scope, receive, tell)

        return timed

    def _time_grpc(self, patch: pytest.MonkeyPatch) -> None:
        run, put, began = Call.run, Call._put, dict[Call, float]()

        def timed_run(call: Call, handler: Any) -> None:
            began[call] = now()
            self.heard.add(_name(call.invocation_metadata()))
            run(call, handler)

        def timed_put(call: Call, answer: Any) -> None:
            put(call, answer)
            self.seconds[_name(call.invocation_metadata())] = now() - began[call]

        patch.setattr(Call, "run", timed_run)
        patch.setattr(Call, "_put", timed_put)


def _name(headers: Iterable[tuple[str | bytes, str | bytes]]) -> str:
    named = {_text(name): _text(value) for name, value in headers}
    return named.get(IDEMPOTENCY_KEY, "")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
