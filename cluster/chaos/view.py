"""Faults and findings as people and programs read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.chaos.check import Result
from cluster.chaos.checker import Kind
from cluster.chaos.run import Happened
from router.ledger.entry import State

#: Of very many findings the table shows the first ones; JSON has them all.
_SHOWN = 50


def happened(log: Sequence[Happened]) -> Table:
    """How often each fault was made, and how often it was refused."""
    made = Counter(each.name for each in log if not each.error)
    refused = Counter(each.name for each in log if each.error)
    table = Table("fault", "made", "refused", box=SIMPLE_HEAD, pad_edge=False)
    for name in sorted(made.keys() | refused.keys()):
        table.add_row(name, str(made[name]), str(refused[name]))
    return table


def result_table(result: Result) -> Group:
    findings = Table("what", "request", "why", box=SIMPLE_HEAD, pad_edge=False)
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
