"""Earlier turns of a session, from this router's memory or from the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from everlift import logs
from everlift.errors import EverliftError
from everlift.messages import Submission
from everlift.request_id import tenant_of
from router.event_loop import now
from router.ledger.base import Ledger
from router.requests import tokenizer
from router.requests.recovery import restored_request
from router.requests.served_models import ServedModels
from router.requests.splicing import PromptMark, Turn
from router.requests.turns import Turns

log = logs.get_logger(__name__)

#: Seconds for which a prompt waits for turns from the ledger; it is then tokenised without them.
_LEDGER_S = 0.25


class SessionTurns:
    """Finder of the earlier turns that a submission's prompt continues."""

    def __init__(self, turns: Turns, ledger: Ledger, models: ServedModels) -> None:
        self._turns = turns
        self._ledger = ledger
        self._models = models

    async def find(self, submission: Submission) -> Sequence[Turn]:
        """Return known turns of a submission's session, newest first.

        The turn that the prompt continues is read from the ledger if this router does not remember
        it and the tokenizer has boundaries. The turn may have ended at another router or before a
        restart. Only turns that this router remembers are returned if the ledger fails or is slow.
        The result is empty without a session, or if the prompt is not a text. Raises the errors of
        ``ServedModels.requested``.
        """
        model = self._models.requested(submission.model)
        known, text = self._turns.of(submission, model.name, now()), submission.prompt
        if not submission.session_id or not isinstance(text, str):
            return ()
        if not model.tokenizer.boundaries:
            return known
        has_added = submission.add_special_tokens
        knows_last = await tokenizer.with_text(
            len(text), lambda: any(it.mark.is_last(text, has_added=has_added) for it in known)
        )
        if knows_last:
            return known
        try:
            async with asyncio.timeout(_LEDGER_S):
                await self._read(submission, text, known)
        except (TimeoutError, EverliftError) as error:
            log.info("session not read from the ledger", cause=str(error) or "too slow")
        return self._turns.of(submission, model.name, now())

    async def _read(self, submission: Submission, text: str, known: Sequence[Turn]) -> None:
        """Read the longest turn with which ``text`` begins, and remember it.

        Do nothing if that turn is among ``known``, or if ``text`` begins with none. A turn of
        another model or fingerprint is not remembered. Raises LedgerUnavailable, and UnknownRequest
        if the turn was erased or expired meanwhile.
        """
        ids = {turn.request_id for turn in known}
        marks = {turn.request_id: turn.mark for turn in known}
        for stored in await self._ledger.turns(
            tenant_of(submission.request_id), submission.session_id
        ):
            mark = PromptMark.from_bytes(stored.turn)
            if mark is not None and stored.request_id not in ids:
                marks[stored.request_id] = mark
        has_added = submission.add_special_tokens
        matches = await tokenizer.with_text(
            len(text),
            lambda: {it: mark.match(text, has_added=has_added) for it, mark in marks.items()},
        )
        longest = max(matches, key=matches.__getitem__, default="")
        if longest in ids or not matches.get(longest):
            return
        stored_request = await self._ledger.read(longest)
        request = stored_request.request
        model = self._models.requested(submission.model)
        is_same = request.model == model.name
        if is_same and request.fingerprint == model.fingerprint:
            live = await restored_request(stored_request, model.tokenizer)
            self._turns.add(live, now())
