"""Output of faults and findings, as text and tables for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.chaos.check import Result
from cluster.chaos.checker import Kind
from cluster.chaos.run import Injection
from everlift.v1 import chaos_pb2 as pb
from everlift.v1 import inference_pb2 as status_pb
from router.faults.faults import LEDGER
from router.ledger.entry import State

#: Maximum number of findings in the table, the first ones. The JSON output has all of them.
_SHOWN = 50


def fault_message(fault: pb.Fault, target: str, running: Mapping[str, int]) -> str:
    """Return a sentence that states what ``fault`` did to ``target``.

    ``running`` has, by worker id, the number of running sequences before the fault.
    """
    name = _target_name(target, running)
    match fault.kind:
        case pb.FAULT_KIND_KILL:
            requests = running.get(target, 0)
            migrated = f"; its {requests} running sequences resume elsewhere" if requests else ""
            rank = f"rank {fault.rank} of " if fault.rank else ""
            return f"killed {rank}{name}{migrated}"
        case pb.FAULT_KIND_PAUSE:
            return f"paused {name} for {fault.seconds:g} s"
        case pb.FAULT_KIND_PARTITION:
            peer = fault.peer or "everything"
            return f"cut {name} off from {peer} for {fault.seconds:g} s"
        case _ if target in running:
            return f"steps of {name} take {fault.factor:g} times as long for {fault.seconds:g} s"
        case _:
            return f"calls of {name} take {fault.delay_s:g} s longer for {fault.seconds:g} s"


def _target_name(target: str, running: Mapping[str, int]) -> str:
    if target == LEDGER:
        return "the ledger"
    return f"{'worker' if target in running else 'router'} {target}"


def outcome(
    log: Sequence[Injection],
    before: status_pb.GetStatusResponse,
    after: status_pb.GetStatusResponse,
) -> str:
    """Return a summary of a run: the number of injected faults, and of requests by outcome.

    Entries of ``log`` with an error are not counted as faults. The numbers of completed, migrated
    and failed requests are the increases of one router's counters during the run. The counters are
    read from its statuses at the start (``before``) and at the end (``after``). A decrease, after a
    restart of the router, counts as 0.
    """
    made = sum(not each.error for each in log)
    counters = (
        f"{max(0, getattr(after, name) - getattr(before, name))} {name}"
        for name in ("completed", "migrated", "failed")
    )
    return (
        f"{made} faults injected; requests of the answering router meanwhile: "
        f"{', '.join(counters)}\n"
        "`everlift chaos check` searches the ledger for broken requests"
    )


def injections_table(log: Sequence[Injection]) -> Table:
    """Return a table of how often each fault was injected, and how often the attempt failed."""
    made = Counter(each.name for each in log if not each.error)
    failed = Counter(each.name for each in log if each.error)
    table = Table("fault", "injected", "failed", box=SIMPLE_HEAD, pad_edge=False)
    for name in sorted(made.keys() | failed.keys()):
        table.add_row(name, str(made[name]), str(failed[name]))
    return table


def result_table(result: Result) -> Group:
    findings = Table("violation", "request", "detail", box=SIMPLE_HEAD, pad_edge=False)
    for finding in result.findings[:_SHOWN]:
        findings.add_row(finding.kind.value, escape(finding.request_id), escape(finding.detail))
    found = Counter(finding.kind for finding in result.findings)
    return Group(
        *([findings] if result.findings else []),
        Text("requests  " + "   ".join(f"{s.value} {result.states[s]}" for s in State)),
        Text("findings  " + "   ".join(f"{kind.value} {found[kind]}" for kind in Kind)),
    )


def as_json(result: Result) -> dict[str, object]:
    found = Counter(finding.kind for finding in result.findings)
    return {
        "requests": {state.value: result.states[state] for state in State},
        "tokens": result.tokens,
        "counts": {kind.value: found[kind] for kind in Kind},
        "findings": [
            {"what": each.kind.value, "request_id": each.request_id, "why": each.detail}
            for each in result.findings
        ],
    }
