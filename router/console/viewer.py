"""Viewer of the console: its permissions, and the state that it has received. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everlift.request_id import tenant_of
from router.api.http.writer import encode
from router.auth.caller import Caller, Scope
from router.console import workers
from router.console.slot_grid import LOST, Lanes, SlotChanges, SlotGrid, Transfer
from router.console.snapshot import Snapshot


class Viewer:
    """State of one page that receives the console's event stream.

    The permissions of ``caller`` may change between events. ``lanes`` has the workers whose slots
    the page shows.
    """

    def __init__(self, snapshot: Snapshot, caller: Caller, lanes: Lanes) -> None:
        self._snapshot = snapshot
        self.caller = caller
        self._lanes = lanes
        self._slot_grid = SlotGrid()
        #: sections as they were last sent, as JSON
        self._sent: dict[str, str] = {}
        self._last_event = 0
        self._has_history = False

    def frame(self, sections: Mapping[str, str], now: float) -> str:
        """Return the next event: a JSON object with the sections that changed since the last event.

        ``sections`` maps the names of the snapshot's sections to their JSON texts. ``now`` is the
        time in seconds (``event_loop.now()``). The cost grows with the number of workers, and with
        the number of batch slots of the workers that the page shows.
        """
        links = self._snapshot.links
        self._lanes.update([name for name in sorted(links) if links[name].is_up], now)
        lanes = self._lanes.worker_ids
        tenant = None if Scope.ADMIN in self.caller.scopes else self.caller.tenant
        own = {
            "you": self._permissions(),
            "lanes": lanes,
            "tenants": self._snapshot.tenants(tenant),
            "prompts": {
                "workers": self._snapshot.worker_prompts(lanes),
                "tenants": self._snapshot.tenant_prompts(tenant),
            },
        }
        changed = self._changed(sections) | self._changed(
            {name: encode(value) for name, value in own.items()}
        )
        changed |= {name: encode(value) for name, value in self._slot_changes(now).items() if value}
        if events := self._new_events():
            changed["happened"] = encode(events)
        if not self._has_history:
            self._has_history = True
            changed["history"] = encode(self._snapshot.history.points)
        parts = [f'"at":{now:.3f}', *(f'"{name}":{text}' for name, text in changed.items())]
        return "{" + ",".join(parts) + "}"

    def _changed(self, sections: Mapping[str, str]) -> dict[str, str]:
        changed = {name: text for name, text in sections.items() if self._sent.get(name) != text}
        self._sent |= changed
        return changed

    def _permissions(self) -> dict[str, Any]:
        scopes = sorted(scope.value for scope in self.caller.scopes)
        return {"tenant": self.caller.tenant, "scopes": scopes}

    def _new_events(self) -> list[dict[str, Any]]:
        events = self._snapshot.events
        new = events.after(self._last_event)
        self._last_event = events.last
        return [each.as_json() for each in new]

    # lanes

    def _slot_changes(self, now: float) -> dict[str, Any]:
        links, lanes = self._snapshot.links, self._lanes.worker_ids
        occupancies = {
            worker_id: workers.occupancy(links[worker_id]) if worker_id in links else LOST
            for worker_id in lanes
        }
        changes = self._slot_grid.update(occupancies, now)
        # Another worker may already have the lane of a worker that is gone.
        places = {worker_id: place for place, worker_id in enumerate(lanes)}
        return {
            "seats": [
                [
                    places[change.slot_id.worker_id],
                    change.slot_id.slot,
                    change.key,
                    int(change.phase),
                ]
                for change in changes.slots
                if change.slot_id.worker_id in places
            ],
            "names": self._names(changes),
            "transfers": [
                _transfer(each, places)
                for each in changes.transfers
                if each.source.worker_id in places
            ],
        }

    def _names(self, changes: SlotChanges) -> dict[str, str]:
        return {
            str(key): self.caller.name(request_id)
            for key, request_id in changes.requests.items()
            if self._may_see(request_id)
        }

    def _may_see(self, request_id: str) -> bool:
        caller = self.caller
        if Scope.ADMIN in caller.scopes:
            return True
        return Scope.INFER in caller.scopes and tenant_of(request_id) == caller.tenant


def _transfer(transfer: Transfer, places: Mapping[str, int]) -> dict[str, Any]:
    source, target = transfer.source, transfer.target
    return {
        "key": transfer.key,
        "cause": transfer.cause.value,
        "from": [places[source.worker_id], source.slot],
        "to": [places[target.worker_id], target.slot],
        "left_at": round(transfer.left_at, 3),
    }
