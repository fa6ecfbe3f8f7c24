"""Stand-in for the Hugging Face hub on loopback: the part of its HTTP that huggingface_hub uses.

GET  /api/models/ORG/NAME[/revision/REV]       commit of a revision
GET  /api/models/ORG/NAME/tree/COMMIT          files of a commit
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
    """Repository with its commits.

    ``revisions`` maps branches and tags to commits. ``refusal`` is the status and error code of the
    answer to requests without ``token``.
    """

    commits: dict[str, Files] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    token: str = ""
    refusal: tuple[int, str] = (401, "RepoNotFound")


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    #: requests so far: method and path
    requests: list[str] = field(default_factory=list)
    #: numbers of bytes after which the connections of the next downloads break
    cuts: list[int] = field(default_factory=list)
    #: while cleared, a download stops after its first byte, and ``stalled`` is set
    flows: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)

    def push(self, name: str, files: Files, revision: str = "main") -> str:
        """Add ``files`` as the next commit of ``revision``; return the commit."""
        repository = self.repositories.setdefault(name, Repository())
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
        repository.commits[commit] = files
        repository.revisions[revision] = commit
        return commit

    def downloads(self) -> list[str]:
        """Return the names of the files whose download was begun."""
        return sorted(
            line.rpartition("/")[2]
            for line in self.requests
            if line.startswith("GET") and "/resolve/" in line
        )


class _Refused(Exception):
    """Error answered with ``status`` and the hub's error ``code``."""

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
    """Run a hub that this process and its children use, with ``cache`` as the cache directory.

    The constants of huggingface_hub are patched, because it reads its environment only on import.
    """
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
