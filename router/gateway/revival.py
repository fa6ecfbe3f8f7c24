"""Live requests, made of what a client sent or of what the ledger has."""

from __future__ import annotations

import asyncio

from everlift.messages import Request
from everlift.text import Tokenizer
from router.clock import now
from router.gateway.live import LiveRequest
from router.gateway.output import Output
from router.ledger.entry import Entry, Stored, StoredChoice

#: Replayed before others have their turn.
_TOKENS_AT_ONCE = 1024


def begun(request: Request, entry: Entry, tokenizer: Tokenizer) -> LiveRequest:
    """Before its first token."""
    outputs = [Output.of(request, tokenizer) for _ in range(request.n)]
    return LiveRequest(request, entry, outputs, now())


async def revived(stored: Stored, tokenizer: Tokenizer) -> LiveRequest:
    """As it was when the ledger heard of it last."""
    outputs = [await _replayed(stored.request, choice, tokenizer) for choice in stored.choices]
    return LiveRequest(stored.request, stored.entry, outputs, now(), stored.prompt_logprobs)


async def _replayed(request: Request, choice: StoredChoice, tokenizer: Tokenizer) -> Output:
    output = Output.of(request, tokenizer)
    for start in range(0, len(choice.tokens), _TOKENS_AT_ONCE):
        part = slice(start, start + _TOKENS_AT_ONCE)
        output.extend(choice.tokens[part], choice.logprobs[part])
        await asyncio.sleep(0)
    return output
