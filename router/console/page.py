"""Files of the console's page, with headers that forbid content from other sites."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

from starlette.responses import RedirectResponse, Response

from everlift.errors import UnknownPath
from router.api.http.endpoint import Call

_DIRECTORY = Path(__file__).parent / "page"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # The browser then refuses to turn text into markup or a script (Trusted Types).
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
#: Headers of all answers of the console.
SECURITY_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class _File:
    media_type: str
    body: bytes
    etag: str

    @classmethod
    def read(cls, path: Path) -> Self:
        body = path.read_bytes()
        return cls(_MEDIA_TYPES[path.suffix], body, f'"{sha256(body).hexdigest()[:16]}"')


class Page:
    """Handlers of the page's files, which are read from disk once."""

    def __init__(self) -> None:
        paths = (path for path in _DIRECTORY.iterdir() if path.suffix in _MEDIA_TYPES)
        self._files = {path.name: _File.read(path) for path in paths}

    async def without_slash(self, call: Call) -> Response:
        """Redirect to the path with a final slash, to which the page's file names are relative."""
        call.response_headers |= SECURITY_HEADERS
        return RedirectResponse("console/")

    async def index(self, call: Call) -> Response:
        return self._answer(_INDEX, call)

    async def file(self, call: Call) -> Response:
        """Return the file of the page that the path names. Raises UnknownPath if there is none."""
        return self._answer(call.request.path_params["file"], call)

    def _answer(self, name: str, call: Call) -> Response:
        call.response_headers |= SECURITY_HEADERS
        if (file := self._files.get(name)) is None:
            raise UnknownPath("the console has no such file")
        # With no-cache, a browser checks at each use whether the file has changed.
        headers = {"etag": file.etag, "cache-control": "no-cache"}
        if call.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)
