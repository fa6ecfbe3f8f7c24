"""Service that sessions have attained, by which the queue order ``attained`` ranks requests. Pure.

The order follows PLAS, least attained service of programs, in Autellix (arXiv 2502.13965). The
service of a session is the cost of the tokens that were computed for its earlier requests, as in
fair share. Uncached prompt tokens count from the first dispatch on, and output tokens from the end
of the request on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from everlift.v1 import session_pb2
from router.admission.recent_ranks import RecentRanks
from router.admission.request import Waiting

#: A session to which no cost was charged for this many seconds is forgotten.
EXPIRES_S = 3600.0
#: Maximum number of sessions; beyond it the one that was charged least recently is forgotten.
MAX_SESSIONS = 1 << 16


class _Session(NamedTuple):
    service: float
    used_at: float


class AttainedService:
    """Attained service of each session, by which requests are ranked; ``now`` is in seconds.

    Each prompt token costs ``prompt_token``, and each output token costs ``output_token``. A new
    leader knows no attained service, so its order is initially fifo. Operations are O(1)
    amortised, except that ``ranked`` also searches among the last 1,024 requests.
    """

    def __init__(self, prompt_token: float, output_token: float) -> None:
        self._prompt_token = prompt_token
        self._output_token = output_token
        #: by session number; the least recently charged session is first
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._ranks = RecentRanks()

    def __len__(self) -> int:
        return len(self._sessions)

    def attained(self, session: int) -> float:
        """Return the attained service of a session; 0 for an unknown session or no session (0)."""
        known = self._sessions.get(session)
        return 0.0 if known is None else known.service

    def ranked(self, waiting: Waiting, now: float) -> Waiting:
        """Return a copy of a request that enters the queue, with its ``attained_rank`` set.

        The rank is the share of recent requests whose sessions had attained less service. The rank
        is 0 for a session without attained service. The rank is also 0 for a request that has been
        dispatched before, because such a request does not yield to others again.
        """
        if waiting.has_run:
            return waiting._replace(attained_rank=0.0)
        self._forget_expired(now)
        attained = self.attained(waiting.session)
        rank = self._ranks.rank(attained)
        return waiting._replace(attained_rank=rank if attained else 0.0)

    def charge_prompt(self, waiting: Waiting, cached_tokens: int, now: float) -> None:
        """Add the cost of a dispatched request's prompt, unless the request has run before.

        The first ``cached_tokens`` tokens are free: the request's worker has them in its cache.
        """
        if not waiting.has_run:
            uncached = waiting.prefill_tokens - cached_tokens
            self._charge(waiting.session, self._prompt_token * uncached, now)

    def charge_outputs(self, outputs: Iterable[session_pb2.SessionOutput], now: float) -> None:
        """Add the cost of each ended request's output tokens to its session's attained service.

        An output has its session and its number of output tokens, of all choices. Session 0 means
        no session, and nothing is charged for it.
        """
        for output in outputs:
            self._charge(output.session, self._output_token * output.tokens, now)

    def _charge(self, session: int, cost: float, now: float) -> None:
        if not session:
            return
        self._sessions[session] = _Session(self.attained(session) + cost, now)
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _forget_expired(self, now: float) -> None:
        while self._sessions:
            session, oldest = next(iter(self._sessions.items()))
            if now - oldest.used_at < EXPIRES_S:
                return
            del self._sessions[session]
