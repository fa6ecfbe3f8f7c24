"""The workers whose slots one page is shown. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: At most; and where the page has chosen none.
MOST_LANES = 8
_MOST_BY_THEMSELVES = 6
#: A worker that is gone keeps its lane for so long: what became of its requests is to be seen.
_KEPT_S = 60.0


class Lanes:
    """Each keeps its place among them. ``chosen`` None: they come by themselves."""

    def __init__(self, chosen: Sequence[str] | None) -> None:
        self._is_chosen = chosen is not None
        self.worker_ids = list(dict.fromkeys(chosen or ()))[:MOST_LANES]
        #: by worker, since when it is not there
        self._gone: dict[str, float] = {}

    def look(self, there: Collection[str], now: float) -> None:
        """``there`` are the workers that are up, in some order that lasts."""
        if self._is_chosen:
            return
        gone = [worker_id for worker_id in self.worker_ids if worker_id not in there]
        self._gone = {worker_id: self._gone.get(worker_id, now) for worker_id in gone}
        for worker_id in there:
            if worker_id not in self.worker_ids and not self._take(worker_id, now):
                return

    def _take(self, worker_id: str, now: float) -> bool:
        """A lane, if there is one."""
        if len(self.worker_ids) < _MOST_BY_THEMSELVES:
            self.worker_ids.append(worker_id)
            return True
        old = next((it for it, since in self._gone.items() if now - since >= _KEPT_S), None)
        if old is None:
            return False
        del self._gone[old]
        self.worker_ids[self.worker_ids.index(old)] = worker_id
        return True
