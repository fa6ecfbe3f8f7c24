"""A stand-in for the Hugging Face hub on loopback: as much of its HTTP as huggingface_hub uses.

GET  /api/models/ORG/NAME[/revision/REV]       which commit that is
GET  /api/models/ORG/NAME/tree/COMMIT          the files of a commit
HEAD, GET /ORG/NAME/resolve/COMMIT/FILE        a file, or a range of it
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

Files = dict[str, bytes]


@dataclass
class Repository:
    """``revisions`` are commits by their branches and tags; ``refusal`` is the error code, with its
    status, that the hub has for whoever lacks ``token``."""

    commits: dict[str, Files] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    token: str = ""
    refusal: tuple[int, str] = (401, "RepoNotFound")


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    #: the requests so far: method and path
    requests: list[str] = field(default_factory=list)
    #: connections that break off so many bytes into a file's next answers
    cuts: list[int] = field(default_factory=list)
    #: while it is cleared, files are begun and not gone on with, and then ``stalled``
    flows: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)

    def push(self, name: str, files: Files, revision: str = "main") -> str:
        """Makes ``files`` the next commit of ``revision``."""
        repository = self.repositories.setdefault(name, Repository())
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
        repository.commits[commit] = files
        repository.revisions[revision] = commit
        return commit

    def downloads(self) -> list[str]:
        """The files that were sent, or begun."""
        return sorted(
            line.rpartition("/")[2]
            for line in self.requests
            if line.startswith("GET") and "/resolve/" in line
        )


class _Refused(Exception):
    """Answered with ``status`` and the hub's word for the error."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.hub.requests.append(f"{self.command} {path}")
        try:
            self._route(path)
        except _Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._send(refused.status, headers, b"")

    def _route(self, path: str) -> None:
        match path.removeprefix("/api/models").strip("/").split("/"):
            case [org, name, "resolve", revision, file]:
                self._file(*self._commit(f"{org}/{name}", revision), file)
            case [org, name, "tree", revision]:
                _, files = self._commit(f"{org}/{name}", revision)
                self._json([_entry(path, content) for path, content in files.items()])
            case [org, name, "revision", revision]:
                self._info(f"{org}/{name}", revision)
            case [org, name]:
                self._info(f"{org}/{name}", "main")
            case _:
                raise _Refused(404, "")

    def _info(self, name: str, revision: str) -> None:
        commit, _ = self._commit(name, revision)
        self._json({"id": name, "sha": commit})

    def _commit(self, name: str, revision: str) -> tuple[str, Files]:
        repository = self.server.hub.repositories.get(name)
        if repository is None:
            raise _Refused(404, "RepoNotFound", "Repository not found")
        self._admit(repository)
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def _admit(self, repository: Repository) -> None:
        shown = self.headers.get("authorization", "").removeprefix("Bearer ")
        if shown == repository.token:
            return
        if shown and repository.refusal[1] != "GatedRepo":
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        raise _Refused(*repository.refusal, "Access is restricted")

    def _file(self, commit: str, files: Files, file: str) -> None:
        if file not in files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        content = files[file]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(content)}"'}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._send(206 if first else 200, headers, content[first:], is_file=True)

    def _json(self, value: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send(
        self, status: int, headers: dict[str, str], body: bytes, *, is_file: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self._write(body, is_file)

    def _write(self, body: bytes, is_file: bool) -> None:
        hub = self.server.hub
        if is_file and not hub.flows.is_set():
            self.wfile.write(body[:1])
            hub.stalled.set()
            hub.flows.wait()
            self.close_connection = True
        elif is_file and hub.cuts:
            self.wfile.write(body[: hub.cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub


@contextmanager
def serving() -> Iterator[Hub]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.hub.flows.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.hub
    finally:
        server.hub.flows.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def in_use(cache: Path) -> Iterator[Hub]:
    """The hub of this process and of its children, with ``cache``. huggingface_hub reads its
    variables but once, when it is imported."""
    with serving() as hub, pytest.MonkeyPatch.context() as patch:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HUB_CACHE", str(cache))
        patch.delenv("HF_TOKEN", raising=False)
        yield hub
        close_session()


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
