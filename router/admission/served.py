"""What a gateway has to tell the leader of its tenants' outputs. Pure."""

from __future__ import annotations

from collections import Counter

from everlift.v1 import session_pb2


class ServedOutputs:
    """Tokens that came since they were told last, by tenant and class."""

    def __init__(self) -> None:
        self._tokens: Counter[tuple[str, int]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, tenant: str, priority: int, tokens: int) -> None:
        self._tokens[tenant, priority] += tokens

    def take(self) -> list[session_pb2.ServedTokens]:
        """Each is told once."""
        tokens, self._tokens = self._tokens, Counter()
        return [
            session_pb2.ServedTokens(tenant=tenant, priority=priority, tokens=number)
            for (tenant, priority), number in tokens.items()
        ]
