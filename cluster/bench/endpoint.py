"""Clients of the endpoints that answer a load, and the recorder of an answer's times and sizes."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from cluster.bench.load import Request
from cluster.bench.report import CountedBy, Outcome
from cluster.errors import BenchFailed
from cluster.sse import DONE, Events
from everlift import AsyncClient, EverliftError

#: Pattern of an error's code or type that may be reported: a single word. Any other text, and every
#: error message, is left out, because it may contain a part of a prompt or of an API key.
_SLUG = re.compile(r"[A-Za-z_]{1,48}\d?")


class Refused(Exception):
    """Raised if a request gets no complete answer; the text is an error slug, a status, or both."""


class Endpoint(Protocol):
    async def send(self, request: Request, answer: Answer) -> None:
        """Send a request, record its output in ``answer``, and return when the answer is complete.

        Raises Refused if the request fails or the answer is incomplete.
        """
        ...


class Answer:
    """Recorder of the times and sizes of the answer to one request.

    ``now`` returns the seconds since the load began.
    """

    def __init__(self, request: Request, now: Callable[[], float]) -> None:
        self._now = now
        self._request = request
        self._sent: float | None = None
        self._pieces = array("d")
        self._texts: list[str] = []
        self._reported_tokens = 0
        self._usage: tuple[int, int] | None = None

    @property
    def has_output(self) -> bool:
        """Return whether some of the output has arrived."""
        return bool(self._pieces)

    def mark_sent(self) -> None:
        """Record that the request is sent now."""
        self._sent = self._now()

    def add_piece(self, text: str, tokens: int = 0) -> None:
        """Record that a piece of output, one chunk of the stream, arrives now.

        ``tokens`` is its number of tokens; 0 if unknown.
        """
        self._pieces.append(self._now())
        self._reported_tokens += tokens
        self._texts.append(text)

    def set_usage(self, prompt_tokens: int, output_tokens: int) -> None:
        self._usage = prompt_tokens, output_tokens

    def outcome(self, due: float, admitted: float, error: str = "") -> Outcome:
        """Return the measured times and sizes of the request, which ends now.

        ``due`` is the time at which the request should have been sent, ``admitted`` the time at
        which the concurrency limit admitted it; both are in seconds since the load began. ``error``
        is empty if the request succeeded.
        """
        prompt_tokens, output_tokens = self._usage or (0, 0)
        known = output_tokens or self._reported_tokens
        if not error and not self._pieces:
            error = "no_output"
        return Outcome(
            due,
            admitted,
            admitted if self._sent is None else self._sent,
            self._now(),
            self._pieces,
            prompt_tokens or self._request.prompt_tokens,
            known or len(self._pieces),
            CountedBy.USAGE if known else CountedBy.PIECES,
            error,
            "" if known else "".join(self._texts),
        )


def slug(code: object) -> str:
    """Return the ``code`` of an endpoint's error if it is one word, else an empty text."""
    return code if isinstance(code, str) and _SLUG.fullmatch(code) else ""


class EverliftEndpoint:
    """Router of a cluster as an endpoint, called over gRPC through ``client``.

    The client should not retry rejected requests, because a rejection is a result to report.
    """

    def __init__(self, client: AsyncClient, *, ignore_eos: bool, temperature: float) -> None:
        self._client = client
        self._ignore_eos = ignore_eos
        self._temperature = temperature

    async def send(self, request: Request, answer: Answer) -> None:
        try:
            stream = self._client.generate(
                request.prompt,
                max_tokens=request.max_tokens,
                ignore_eos=self._ignore_eos,
                temperature=self._temperature,
            )
            answer.mark_sent()
            async with stream:
                async for chunk in stream:
                    answer.add_piece(chunk.text, len(chunk.token_ids))
        except EverliftError as error:
            raise Refused(error.slug) from None
        if stream.usage is not None:
            answer.set_usage(stream.usage.prompt_tokens, stream.usage.output_tokens)


_MOST_ERROR_BYTES = 16_384
#: Value for aiohttp: no limit on the number of connections. Only the server may limit it.
_NO_LIMIT = 0


def base_url(text: str) -> str:
    """Return the base URL of an OpenAI endpoint; /v1 is added if ``text`` has no path.

    Raises BenchFailed for an invalid URL, or one with credentials or a query.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchFailed(f"--url {text!r}: must be a URL such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        raise BenchFailed("--url must not contain credentials or a query: use --api-key")
    return text.rstrip("/") if parts.path.strip("/") else f"{text.rstrip('/')}/v1"


@asynccontextmanager
async def http_session(url: str, api_key: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    """Context manager: yield an open HTTP session for paths below ``url``.

    ``url`` is a result of ``base_url``.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(
        f"{url}/",
        headers=headers,
        connector=aiohttp.TCPConnector(limit=_NO_LIMIT),
        cookie_jar=aiohttp.DummyCookieJar(),
        # The generator has its own timeout for an answer.
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        yield session


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the name of the first model in the endpoint's list of models.

    Raises BenchFailed if there is none or no valid answer; ``url`` is only for error messages.
    """
    try:
        async with session.get("models", allow_redirects=False) as response:
            if response.status != 200:
                raise BenchFailed(f"the list of models is unavailable: {await _cause(response)}")
            listed = await response.json()
        return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise BenchFailed(
            f"{url} returned no list of models ({type(error).__name__}): check --url or set --model"
        ) from None


class OpenAiEndpoint:
    """OpenAI-compatible HTTP endpoint; ``fields`` are added to the body of every request.

    ``fields`` override default values such as that of ``temperature``. The prompt, ``max_tokens``
    and the ``fields`` of a Request override both.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: str,
        *,
        ignore_eos: bool,
        temperature: float,
        is_chat: bool = False,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        self._session = session
        self._path = "chat/completions" if is_chat else "completions"
        self._is_chat = is_chat
        self._default_fields = {
            "model": model,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Sent only if True, because other servers may not know this field.
            **({"ignore_eos": True} if ignore_eos else {}),
            **(fields or {}),
        }

    async def send(self, request: Request, answer: Answer) -> None:
        body = self._body(request)
        answer.mark_sent()
        try:
            async with self._session.post(self._path, json=body, allow_redirects=False) as response:
                if response.status != 200:
                    raise Refused(await _cause(response))
                await self._read(response, answer)
        except aiohttp.ClientConnectorError:
            raise Refused("unreachable") from None
        except (aiohttp.ClientError, ConnectionError):
            raise Refused("broken_off") from None

    def _body(self, request: Request) -> dict[str, object]:
        prompt = (
            {"messages": [{"role": "user", "content": request.prompt}]}
            if self._is_chat
            else {"prompt": request.prompt}
        )
        return {
            **self._default_fields,
            **prompt,
            "max_tokens": request.max_tokens,
            **request.fields,
        }

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        events = Events()
        async for data in response.content.iter_any():
            for event in events.of(data):
                if event == DONE:
                    return
                try:
                    self._record_chunk(_parsed(event), answer)
                except (AttributeError, TypeError, ValueError):
                    raise Refused("malformed_chunk") from None
        raise Refused("broken_off")

    def _record_chunk(self, chunk: dict[str, Any], answer: Answer) -> None:
        if "error" in chunk:
            raise Refused(_error_slug(chunk) or "error_in_stream")
        for choice in chunk.get("choices") or ():
            text = self._text(choice)
            if text or self._has_tokens(choice, answer):
                answer.add_piece(text)
        if usage := chunk.get("usage"):
            counts = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
            answer.set_usage(*(int(number or 0) for number in counts))

    def _has_tokens(self, choice: Mapping[str, Any], answer: Answer) -> bool:
        """Return whether a chunk without text stands for output tokens.

        Special tokens and parts of a character are tokens without text. A chunk with a finish
        reason usually carries no token, so it counts only if no output has arrived before it. Other
        chunks count in a completion, but not in a chat, whose first chunk may carry only a role.
        """
        if choice.get("finish_reason") is not None:
            return not answer.has_output
        return not self._is_chat

    def _text(self, choice: Mapping[str, Any]) -> str:
        if not self._is_chat:
            return str(choice.get("text") or "")
        delta = choice.get("delta") or {}
        texts = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
        calls = [
            call.get("function", {}).get("arguments") for call in delta.get("tool_calls") or ()
        ]
        return "".join(text for text in (*texts, *calls) if text)


def _parsed(event: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except ValueError:
        raise Refused("no_json") from None
    if not isinstance(chunk, dict):
        raise Refused("no_json")
    return chunk


async def _cause(response: aiohttp.ClientResponse) -> str:
    content = await response.content.read(_MOST_ERROR_BYTES)
    try:
        found = _error_slug(json.loads(content))
    except ValueError:
        found = ""
    return f"{response.status} {found}".rstrip()


def _error_slug(body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ""
    return slug(error.get("code")) or slug(error.get("type"))
