"""Lookup of request ids that people abbreviate on the command line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from everlift import AsyncClient
from everlift.errors import InvalidRequest, UnknownRequest
from everlift.v1 import inference_pb2 as pb

#: Largest number of requests in one page of the listing.
_PAGE = 1000
#: Largest number of matching ids that an error names.
_SHOWN = 5


async def listed(
    client: AsyncClient,
    *,
    states: Sequence[pb.RequestState.ValueType] = (),
    tenant: str | None = None,
    session_id: str = "",
    limit: int,
) -> AsyncIterator[pb.RequestSummary]:
    """Yield at most ``limit`` requests, newest first, which are read page by page.

    Without ``states``, requests in every state are listed. ``tenant`` selects the requests of one
    tenant, "" those of all tenants, and None those of the caller. With a ``session_id``, only
    requests of this session are listed. Raises Forbidden if the API key does not permit the call.
    """
    token = ""
    while limit:
        page = await client.list_requests(
            states=states,
            page_size=min(limit, _PAGE),
            page_token=token,
            tenant=tenant,
            session_id=session_id,
        )
        for each in page.requests:
            yield each
        limit -= len(page.requests)
        if not (token := page.next_page_token):
            return


async def last(client: AsyncClient) -> str:
    """Return the id of the caller's newest request. Raises UnknownRequest if there is none."""
    async for each in listed(client, limit=1):
        return each.request_id
    raise UnknownRequest("there are no requests yet")


async def completed(client: AsyncClient, prefix: str, limit: int = 100_000) -> str:
    """Return the full id of the only request whose id begins with ``prefix``.

    Only the caller's newest ``limit`` requests are searched.

    Raises:
        UnknownRequest: No id begins with ``prefix``.
        InvalidRequest: Several ids begin with ``prefix``.
    """
    found = [
        each.request_id
        async for each in listed(client, limit=limit)
        if each.request_id.startswith(prefix)
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnknownRequest(f"no request id is or begins with {prefix!r}")
    shown = ", ".join(found[:_SHOWN]) + ", …" * (len(found) > _SHOWN)
    raise InvalidRequest(f"{len(found)} request ids begin with {prefix!r}: {shown}")
