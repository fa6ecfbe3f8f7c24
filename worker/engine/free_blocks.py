"""Unused blocks of the pool, in the order in which they are reused. Pure.

    empty       no hash; reused first
    ordinary    cached; least recently freed first
    retained    cached for a session; least recently used session first, and within a session the
                last blocks of a prefix first

The blocks of a session are retained while it is between two turns, such as during a tool call.
They become ordinary blocks when the session has not been used for a time, or when too many blocks
are retained. From then on they are ordered among the ordinary blocks by the last use of the
session, as if they had never been retained.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise


@dataclass(slots=True)
class _Session:
    """Session that retains ``blocks``, in the order in which they are reused.

    ``used_at`` is the time of its last use in seconds, and ``age`` the number of calls of
    ``FreeBlocks.add`` until then.
    """

    used_at: float
    age: int
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)


class FreeBlocks:
    """Unused blocks of a pool that has ``num_blocks`` blocks with ids from 0.

    Initially all blocks are unused. A session retains its blocks for ``retention_s`` seconds after
    its last use. All sessions together retain at most ``max_retained`` blocks; if there are more,
    blocks of the least recently used session become ordinary ones, in the order of reuse. Every
    operation is O(1) per block, amortised.
    """

    def __init__(self, num_blocks: int, retention_s: float, max_retained: int) -> None:
        self._retention_s = retention_s
        self._max_retained = max_retained
        #: empty and ordinary blocks, in the order of reuse; the values are ages (0: empty)
        self._ordinary = OrderedDict.fromkeys(range(num_blocks), 0)
        #: ordinary blocks that were retained before, in the order of reuse; the values are ages
        self._lapsed: OrderedDict[int, int] = OrderedDict()
        #: sessions that may retain blocks, by number, the least recently used first
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        #: by block, the last session that used it; 0: none
        self._owners = [0] * num_blocks
        self._num_retained = 0
        #: number of calls of ``add``; the age of a block is its value when the block was freed
        self._age = 0
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._lapsed) + self._num_retained

    def __iter__(self) -> Iterator[int]:
        yield from self._ordinary
        yield from self._lapsed
        for session in self._sessions.values():
            yield from session.blocks

    @property
    def num_retained(self) -> int:
        return self._num_retained

    def num_retained_after(self, now: float, num_popped: int) -> int:
        """Return the number of blocks that sessions will retain at time ``now``, in seconds.

        ``num_popped`` is the number of pops between the present and then.
        """
        lapsed = 0
        for session in self._sessions.values():
            if session.used_at + self._retention_s > now:
                break
            lapsed += len(session.blocks)
        retained = self._num_retained - lapsed
        return retained - max(0, num_popped - (len(self) - retained))

    def next_blocks(self) -> tuple[Iterator[int], Iterator[int]]:
        """Return two iterators whose first blocks include those that the next pops return.

        Each block that the next n pops return is among the first n blocks of at least one of the
        iterators, for every n. The guarantee holds until a block is added or removed, no matter
        which retentions end meanwhile.
        """
        retained = (session.blocks for session in self._sessions.values())
        return iter(self._ordinary), chain(self._lapsed, chain.from_iterable(retained))

    def set_time(self, now: float) -> None:
        """Set the time to ``now``, in seconds, and end the retentions that have expired.

        ``now`` must not decrease.
        """
        self._now = now
        while self._sessions:
            number, session = next(iter(self._sessions.items()))
            if session.used_at + self._retention_s > now:
                break
            self._lapsed.update(dict.fromkeys(session.blocks, session.age))
            self._num_retained -= len(session.blocks)
            del self._sessions[number]

    def add_empty(self, block: int) -> None:
        """Add a block without a hash, to be reused next."""
        self._ordinary[block] = 0
        self._ordinary.move_to_end(block, last=False)

    def add(self, blocks: Sequence[int], session: int) -> None:
        """Add cached blocks in the order of reuse; ``session`` used them until now (0: none).

        The session then retains these blocks, and the retention of its other blocks restarts.
        A block added without a session returns to the session that used it last, provided that the
        retention of that session has not ended. The block becomes an ordinary one otherwise.
        """
        self._age += 1
        if session in self._sessions or (session and blocks):
            self._retain(blocks, self._use(session), session)
        elif self._sessions:
            for block in blocks:
                owner = self._owners[block]
                if (owning := self._sessions.get(owner)) is None:
                    self._ordinary[block] = self._age
                else:
                    self._retain((block,), owning, owner)
        else:
            self._ordinary.update(dict.fromkeys(blocks, self._age))
        while self._num_retained > self._max_retained:
            age, block = self._pop_retained()
            self._lapsed[block] = age

    def _use(self, session: int) -> _Session:
        blocks = before.blocks if (before := self._sessions.pop(session, None)) else OrderedDict()
        used = self._sessions[session] = _Session(self._now, self._age, blocks)
        return used

    def _retain(self, blocks: Iterable[int], retaining: _Session, session: int) -> None:
        for block in blocks:
            self._owners[block] = session
            retaining.blocks[block] = None
            self._num_retained += 1

    def remove(self, block: int) -> None:
        """Remove a block that is used again."""
        if self._ordinary.pop(block, None) is None and self._lapsed.pop(block, None) is None:
            del self._sessions[self._owners[block]].blocks[block]
            self._num_retained -= 1

    def pop(self) -> int:
        """Remove and return the block to reuse next; there must be one."""
        if (blocks := self._older()) is not None:
            block, _ = blocks.popitem(last=False)
        else:
            _, block = self._pop_retained()
        self._owners[block] = 0
        return block

    def _older(self) -> OrderedDict[int, int] | None:
        """Return ``_ordinary`` or ``_lapsed``: the one whose first block is to be reused first.

        Returns None if both are empty.
        """
        ordinary, lapsed = self._ordinary, self._lapsed
        if ordinary and lapsed:
            is_lapsed = next(iter(lapsed.values())) < next(iter(ordinary.values()))
            return lapsed if is_lapsed else ordinary
        return ordinary or lapsed or None

    def _pop_retained(self) -> tuple[int, int]:
        """Remove the next block of the least recently used session.

        Returns the session's age and the block.
        """
        number, session = next(iter(self._sessions.items()))
        while not session.blocks:
            del self._sessions[number]
            number, session = next(iter(self._sessions.items()))
        block, _ = session.blocks.popitem(last=False)
        self._num_retained -= 1
        if not session.blocks:
            del self._sessions[number]
        return session.age, block

    def check_integrity(self, hashes: Sequence[bytes | None]) -> None:
        """Check invariants; raise AssertionError if one is violated. O(blocks).

        ``hashes`` are those of all blocks of the pool.
        """
        sessions = self._sessions.values()
        assert len({*self}) == len([*self]) == len(self), "a block is free twice"
        num_retained = sum(len(session.blocks) for session in sessions)
        assert self._num_retained == num_retained, "retained blocks"
        assert self._num_retained <= self._max_retained, "too many blocks are retained"
        for queue in (self._ordinary, self._lapsed):
            assert all(one <= other for one, other in pairwise(queue.values())), "ages"
            assert all((age > 0) == (hashes[block] is not None) for block, age in queue.items())
        for one, other in pairwise(sessions):
            assert one.used_at <= other.used_at and one.age < other.age, "order of sessions"
        for number, session in self._sessions.items():
            assert all(self._owners[block] == number for block in session.blocks), "owners"
            assert all(hashes[block] is not None for block in session.blocks), "retained, empty"
