"""Names of chunks and images of prompts, and of sessions, as all ledgers use them. Pure.

A prompt is stored as chunks of 256 tokens, each with its tokens and the name of the chunk before
it, and as the tokens after the last full chunk. Prompts that begin alike share chunks. Requests of
a tenant with the same image share the image.
"""

from __future__ import annotations

import hashlib

from everlift.hashes import CHUNK_SIZE, chunk_hashes, session_hash
from everlift.messages import Request
from everlift.request_id import tenant_of

#: Number of bytes of a hash that are used. They make it infeasible to find two chunks with the same
#: name.
_HASH_BYTES = 16


def chunk_names(request: Request) -> list[str]:
    """Return the name of each full chunk of the prompt, in order.

    A name depends on all tokens up to the end of the chunk and on the request's salt.
    """
    hashes = request.chunk_hashes or chunk_hashes(request.prompt_ids, request.salt)
    return [chunk_hash[:_HASH_BYTES].hex() for chunk_hash in hashes]


def num_chunked(request: Request) -> int:
    """Return the number of the prompt's tokens that are in full chunks."""
    return len(request.prompt_ids) // CHUNK_SIZE * CHUNK_SIZE


def image_names(request: Request) -> list[str]:
    """Return the name of each image of a request, in order."""
    prefix = f"image {tenant_of(request.request_id)}/".encode()
    return [
        hashlib.sha256(prefix + image.digest).digest()[:_HASH_BYTES].hex()
        for image in request.images
    ]


def session_name(tenant: str, session_id: str) -> str:
    """Return the name of a session; empty if ``session_id`` is empty."""
    return session_hash(tenant, session_id)[:_HASH_BYTES].hex() if session_id else ""
