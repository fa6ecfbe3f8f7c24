"""Live requests, made of what a client sent or of what the ledger has."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from everlift.messages import Request
from everlift.text import Tokenizer
from router.event_loop import now
from router.ledger.entry import Entry, State, Stored, StoredChoice
from router.requests.explanation import resumed
from router.requests.output import Output
from router.requests.request import LiveRequest
from router.requests.timing import Journal

#: Replayed before others have their turn.
_TOKENS_AT_ONCE = 1024


def begun(request: Request, entry: Entry, tokenizer: Tokenizer, journal: Journal) -> LiveRequest:
    """Before its first token, and before its dispatch: the entry may tell of that already."""
    outputs = [Output.of(request, tokenizer) for _ in range(request.n)]
    return LiveRequest(request, _before_dispatch(entry), outputs, now(), journal=journal)


def _before_dispatch(entry: Entry) -> Entry:
    if entry.state is not State.RUNNING:
        return entry
    return replace(
        entry,
        state=State.QUEUED,
        worker="",
        epoch=0,
        attempts=entry.attempts - 1,
        moves=entry.moves - 1,
    )


async def revived(stored: Stored, tokenizer: Tokenizer) -> LiveRequest:
    """As it was when the ledger heard of it last."""
    outputs = [await _replayed(stored.request, choice, tokenizer) for choice in stored.choices]
    return LiveRequest(
        stored.request,
        stored.entry,
        outputs,
        now(),
        stored.prompt_logprobs,
        resumed(stored, now()),
    )


async def _replayed(request: Request, choice: StoredChoice, tokenizer: Tokenizer) -> Output:
    output = Output.of(request, tokenizer)
    for start in range(0, len(choice.tokens), _TOKENS_AT_ONCE):
        part = slice(start, start + _TOKENS_AT_ONCE)
        output.extend(choice.tokens[part], choice.logprobs[part])
        await asyncio.sleep(0)
    return output
