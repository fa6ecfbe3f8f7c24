"""Run of a batch by a cluster, through the cluster's Files API and Batches API."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from cluster.batch.lines import Line
from cluster.batch.results import Results
from cluster.errors import BatchFailed
from cluster.http_api import HttpApi
from everlift.client.retries import RECONNECT_S, Retries
from everlift.errors import EverliftError, UnknownObject

_FINAL = ("completed", "failed", "expired", "cancelled")
#: Metadata by which a batch is found again.
_DIGEST = "everlift_digest"
#: Maximum size of the file of one batch.
_MAX_LINES, _MAX_BYTES = 50_000, 64 << 20
#: Seconds for which a cluster keeps results that were not fetched.
_RESULTS_S = 86_400
#: Seconds between two questions about the progress: at first, and at most.
_POLL_S, _MAX_POLL_S = 0.1, 1.0


@dataclass(frozen=True, slots=True)
class ClusterBatch:
    """Batch that a cluster runs as one or more batches of OpenAI's API.

    Lines with different APIs, or too many for one such batch, are divided among several. A batch
    of the API is identified by its API path, ``window``, its lines, and how often each line has
    failed before. A later run with the same values therefore finds the batch again. ``window`` is
    the time within which each batch of the API must be completed, for example ``24h``.
    ``advance`` is called once for each finished line, with the number of output tokens since the
    previous call.
    """

    api: HttpApi
    results: Results
    window: str
    advance: Callable[[int], None]

    async def run(self, lines: Iterable[Line]) -> int:
        """Answer those of ``lines`` that ``results`` does not contain; return their output tokens.

        Raises:
            BatchFailed: The cluster rejects the lines of a batch.
            EverliftError: A call to the cluster fails and must not be repeated, or the cluster is
                unavailable for RECONNECT_S seconds.
            OSError: A result cannot be written completely.
        """
        num_tokens = 0
        for url, part in _parts(line for line in lines if line.custom_id not in self.results):
            num_tokens += await self._run(url, part)
        return num_tokens

    async def cancel(self, read: Callable[[], Iterable[Line]]) -> int:
        """Cancel the unfinished batches of the lines that each call of ``read`` returns.

        The batches of an earlier run are found, even if that run had another ``window`` or retried
        failed lines and this one does not. Returns the number of batches that were cancelled.
        """
        unfinished = await self._unfinished()
        windows = {batch["completion_window"] for batch in unfinished}
        ours = {
            self._digest(url, part, window)
            for has_retries in (False, True)
            for url, part in _parts(self._remaining(read(), has_retries=has_retries))
            for window in windows
        }
        found = [batch for batch in unfinished if batch["metadata"][_DIGEST] in ours]
        for batch in found:
            await self._retried(self.api.post, f"{_path(batch)}/cancel", {})
        return len(found)

    async def _unfinished(self) -> list[Any]:
        """Return the unfinished batches that runs of this command have created."""
        found: list[Any] = []
        after = ""
        while True:
            page = await self._retried(self.api.get, f"v1/batches?limit=100{after}")
            found += [
                batch
                for batch in page["data"]
                if _DIGEST in batch["metadata"] and batch["status"] not in _FINAL
            ]
            if not page["has_more"]:
                return found
            after = f"&after={page['last_id']}"

    def _remaining(self, lines: Iterable[Line], *, has_retries: bool) -> Iterator[Line]:
        """Yield the lines that a run answers; failed ones only if the run retries them."""
        for line in lines:
            if self.results.has_failed(line.custom_id):
                if has_retries:
                    yield line
            elif line.custom_id not in self.results:
                yield line

    async def _run(self, url: str, part: list[Line]) -> int:
        digest, number = self._digest(url, part, self.window), 0
        while True:
            batch = await self._begin(url, part, digest, number)
            if batch["status"] == "failed":
                # An earlier run failed. The cause, such as a setting, may have been removed since.
                await self._delete(batch["input_file_id"])
                number += 1
                continue
            batch = await self._ended(batch)
            if batch["status"] == "failed":
                await self._delete(batch["input_file_id"])
                raise BatchFailed(_cause(batch))
            try:
                await self._fetch(batch)
            except UnknownObject:
                # The results were fetched by an earlier run, or have expired.
                number += 1
                continue
            tokens: int = batch["usage"]["output_tokens"]
            return tokens

    def _digest(self, url: str, part: list[Line], window: str) -> str:
        """Return a hash of the API, ``window``, and each line with the number of its next attempt.

        The hash identifies a batch of these lines, so that a later run finds the batch again. A
        retry of a failed line changes the hash, and is therefore part of a new batch.
        """
        digest = hashlib.sha256(f"{url} {window} ".encode())
        for line in part:
            digest.update(b"%d " % self.results.attempt(line.custom_id) + line.to_bytes())
        return digest.hexdigest()

    async def _begin(self, url: str, part: list[Line], digest: str, number: int) -> Any:
        """Create a batch of the lines, or return the one that an earlier run has created.

        ``digest`` and ``number`` identify the batch. ``number`` is the number of earlier batches
        with the same digest that failed, or whose results the cluster no longer has.
        """
        headers = {"idempotency-key": f"{digest}-{number}"}
        content = b"".join(line.to_bytes() for line in part)
        file = await self._retried(self.api.upload, "batch.jsonl", content, headers)
        body = {
            "input_file_id": file["id"],
            "endpoint": url,
            "completion_window": self.window,
            "metadata": {_DIGEST: digest},
            "output_expires_after": {"anchor": "created_at", "seconds": _RESULTS_S},
        }
        return await self._retried(self.api.post, "v1/batches", body, headers)

    async def _ended(self, batch: Any) -> Any:
        """Wait for the end of a batch, and return it; show its progress."""
        shown_lines = shown_tokens = 0
        poll_s = _POLL_S
        while True:
            counts, tokens = batch["request_counts"], batch["usage"]["output_tokens"]
            more = counts["completed"] + counts["failed"] - shown_lines
            for index in range(more):
                self.advance(tokens - shown_tokens if index == 0 else 0)
            if more:
                shown_lines, shown_tokens = shown_lines + more, tokens
            if batch["status"] in _FINAL:
                return batch
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, _MAX_POLL_S)
            batch = await self._retried(self.api.get, _path(batch))

    async def _fetch(self, batch: Any) -> None:
        """Append a batch's results to the file of results; delete the batch's files in the cluster.

        Raises UnknownObject, and appends nothing, if the cluster no longer has the results.
        """
        names = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
        # All are read before any is appended, because a later run with fewer lines would not find
        # the same batch.
        found = [await self._retried(self._lines, name) for name in names]
        for record in map(json.loads, chain(*found)):
            self.results.append(record)
        await self._delete(*names, batch["input_file_id"])

    async def _delete(self, *names: str) -> None:
        for name in names:
            # A file that remains expires later.
            with suppress(EverliftError):
                await self.api.delete(f"v1/files/{name}")

    async def _lines(self, name: str) -> list[bytes]:
        return [line async for line in self.api.read_lines(f"v1/files/{name}/content")]

    async def _retried(self, call: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
        """Call ``call(*arguments)`` until the cluster has room for it, and return the result.

        A call refused for lack of capacity or quota is retried without a time limit. If the cluster
        is unavailable, the call is retried until RECONNECT_S seconds after the first such error.
        After that time, the EverliftError of the last attempt is raised. Any other error is raised
        at once.
        """
        retries = Retries(RECONNECT_S, math.inf, random.random)
        while True:
            try:
                return await call(*arguments)
            except EverliftError as error:
                delay = retries.delay(error, time.monotonic())
                if delay is None:
                    raise
                await asyncio.sleep(delay)


def _parts(lines: Iterable[Line]) -> Iterator[tuple[str, list[Line]]]:
    """Yield (API path, lines) for each batch that the lines need.

    All lines of a batch have the same API. A batch has at most ``_MAX_LINES`` lines and
    ``_MAX_BYTES`` bytes, unless it is a single longer line.
    """
    groups: dict[str, list[Line]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for line in lines:
        group, size = groups[line.url], len(line.to_bytes())
        if group and (len(group) == _MAX_LINES or sizes[line.url] + size > _MAX_BYTES):
            yield line.url, groups.pop(line.url)
            group, sizes[line.url] = groups[line.url], 0
        group.append(line)
        sizes[line.url] += size
    yield from groups.items()


def _path(batch: Any) -> str:
    return f"v1/batches/{batch['id']}"


def _cause(batch: Any) -> str:
    causes = [
        error["message"] if error["line"] is None else f"line {error['line']}: {error['message']}"
        for error in batch["errors"]["data"]
    ]
    return "the cluster rejects the batch\n  " + "\n  ".join(causes)
