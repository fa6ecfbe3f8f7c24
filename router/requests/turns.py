"""Memory of earlier turns of sessions, whose token ids later prompts reuse."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from everlift.messages import Request, Submission
from everlift.request_id import tenant_of
from router.requests.request import LiveRequest
from router.requests.splicing import PromptMark, Turn, TurnOutput

#: Maximum number of sessions that are remembered. Each takes a kilobyte besides its token ids.
_MAX_SESSIONS = 1 << 14
#: Maximum number of turns of a session that are remembered.
_MAX_TURNS = 8
#: Maximum number of token ids of all sessions. An id takes 4 bytes.
_MAX_IDS = 8 << 20


class SessionKey(NamedTuple):
    """Key of a session. A prompt may reuse token ids only of requests with the same key."""

    tenant: str
    session_id: str
    salt: bytes
    model: str

    @classmethod
    def of(cls, request: Submission | Request, model: str) -> SessionKey:
        """Return the key of a request for ``model``.

        The model is part of the key, because models tokenise the same text differently.
        """
        return cls(tenant_of(request.request_id), request.session_id, request.salt, model)


class Turns:
    """Memory of the turns (finished requests) of recently used sessions.

    Turns that finished at another router are included if this router has read them from the ledger.
    The ``now`` of the methods is the time in seconds of a clock that never goes back.
    """

    def __init__(self, retention_s: float, max_ids: int = _MAX_IDS) -> None:
        """Create an empty store that holds at most ``max_ids`` token ids.

        The sessions that were used least recently are removed first. A turn expires ``retention_s``
        seconds after it was added, and the next call of ``add`` or ``of`` removes it.
        """
        self._retention_s = retention_s
        self._max_ids = max_ids
        #: turns of each session, oldest first; the most recently used session is the last one
        self._sessions: OrderedDict[SessionKey, list[Turn]] = OrderedDict()
        self._sizes: dict[SessionKey, int] = {}
        self._num_ids = 0
        self._key_of: dict[str, SessionKey] = {}
        #: time at which to remove each request, and the request's id, sorted by this time
        self._ends: deque[tuple[float, str]] = deque()

    def of(self, submission: Submission, model: str, now: float) -> Sequence[Turn]:
        """Return the known turns of a submission's session with ``model``, newest first."""
        self._end_retentions(now)
        key = SessionKey.of(submission, model)
        if not submission.session_id or key not in self._sessions:
            return ()
        self._sessions.move_to_end(key)
        return self._sessions[key][::-1]

    def add(self, live: LiveRequest, now: float) -> None:
        """Add a finished request, if it belongs to a session and its prompt was a text."""
        self._end_retentions(now)
        request = live.request
        mark = PromptMark.from_bytes(request.turn)
        if not request.session_id or mark is None or request.request_id in self._key_of:
            return
        outputs = [
            TurnOutput(array("I", choice.output.tokens), choice.output.whole_text)
            for choice in live.choices
        ]
        ids = array("I", request.prompt_ids)
        turn = Turn(request.request_id, mark, ids, outputs, request.chunk_hashes)
        key = SessionKey.of(request, request.model)
        turns = self._sessions.setdefault(key, [])
        _share_ids(turns, turn)
        turns.append(turn)
        self._key_of[request.request_id] = key
        self._ends.append((now + self._retention_s, request.request_id))
        self._keep(key, turns[-_MAX_TURNS:])
        while self._num_ids > self._max_ids or len(self._sessions) > _MAX_SESSIONS:
            self._keep(next(iter(self._sessions)), [])

    def forget(self, request_id: str) -> None:
        """Remove a request, because it is erased."""
        if (key := self._key_of.get(request_id)) is not None:
            self._keep(key, [turn for turn in self._sessions[key] if turn.request_id != request_id])

    def _end_retentions(self, now: float) -> None:
        ends = self._ends
        while ends and (ends[0][0] <= now or ends[0][1] not in self._key_of):
            self.forget(ends.popleft()[1])

    def _keep(self, key: SessionKey, turns: list[Turn]) -> None:
        """Keep only ``turns`` of a session; remove the session if there are none."""
        for turn in self._sessions.pop(key):
            self._key_of.pop(turn.request_id, None)
        self._num_ids -= self._sizes.pop(key, 0)
        if turns:
            self._sessions[key] = turns
            self._sizes[key] = size = _num_ids(turns)
            self._num_ids += size
            self._key_of.update((turn.request_id, key) for turn in turns)


def _share_ids(turns: Sequence[Turn], new: Turn) -> None:
    """Let ``new`` and an earlier turn share the longer of their arrays of ids, to save memory.

    They share it if the shorter array is the beginning of the longer one.
    """
    arrays = {id(turn.ids): turn.ids for turn in turns}
    for ids in arrays.values():
        length = min(len(ids), len(new.ids))
        if ids[:length] != new.ids[:length]:
            continue
        if len(ids) > length:
            new.ids = ids
            return
        for turn in turns:
            if turn.ids is ids:
                turn.ids = new.ids


def _num_ids(turns: Sequence[Turn]) -> int:
    arrays = {id(turn.ids): len(turn.ids) for turn in turns}
    outputs = sum(len(output.ids) for turn in turns for output in turn.outputs)
    return sum(arrays.values()) + outputs
