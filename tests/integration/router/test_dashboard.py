"""The Grafana dashboard and the alerts, against a real Prometheus that reads a real router."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from everlift.client.client import AsyncClient
from everlift.errors import BY_SLUG, InvalidRequest, PromptTooLong
from router.observability.metrics.catalogue import CATALOGUE
from tests.support.in_process import ROUTER, WORKER, Cluster, cluster, receive
from tests.support.ledger.ledgers import found
from tests.support.router.keyring import Keyring
from tests.support.router.prometheus import Prometheus, prometheus

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/everlift.json").read_text())
ALERTS = DEPLOY / "prometheus/alerts.yaml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
RUNBOOK = (DEPLOY / "RUNBOOK.md").read_text()
TESTED = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yaml").read_text())["tests"]
#: Values for the variables in the dashboard's queries.
VARIABLES = {"$job": "everlift", "$worker": ".*", "$__rate_interval": "10s"}
#: Panels without a result here, and why.
EMPTY = {
    "Autoscaler": "Ray exports what the autoscaler says, from the process of Serve's controller",
    "GPU utilisation": "there is no GPU here",
    "Rank correlation of predicted lengths": "no model of lengths is loaded here",
    "Coverage of predicted length quantiles": "no model of lengths is loaded here",
    "Rejected requests by reason": "there is room for all that comes here",
}
#: Outcomes that the error rate excludes.
FORGIVEN = re.compile(r'outcome!~"(ok\|[^"]*)"')
OTHERS_DOING = ("cancelled", "moved", "router_stopping", "unknown_model", "request_conflict")
#: Metrics whose queries, with "> 0", have a result only during a failure.
ONLY_IN_TROUBLE = ("everlift_ledger_failures_total", "everlift_ledger_away", "everlift_worker_slow")


def panels() -> Iterator[Any]:
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def queries(panel: Any) -> Iterator[str]:
    for target in panel["targets"]:
        expression = target["expr"]
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        assert "$" not in expression
        yield expression


async def test_dashboard_queries_all_return_results(tmp_path: Path) -> None:
    found("prometheus")
    keyring = Keyring(tmp_path / "keys.yaml")
    key = await keyring.key("acme")
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    async with cluster(2, 2, config, replace(WORKER, num_blocks=8)) as parts:
        targets = [router.metrics_address for router in parts.routers]
        async with prometheus(tmp_path, targets) as server:
            busy = asyncio.create_task(keep_busy(parts, key))
            try:
                lacking = await without_result(server)
            finally:
                busy.cancel()
                await asyncio.gather(busy, return_exceptions=True)
    assert not lacking


async def without_result(server: Prometheus) -> set[str]:
    """Return the queries without a result, after repeating them for at least 30 s."""
    lacking = {query for panel in panels() for query in queries(panel) if has_result(panel, query)}
    assert len(lacking) > 50
    for _ in range(60):
        lacking = {query for query in lacking if not await server.query(query)}
        if not lacking:
            break
        await asyncio.sleep(0.5)
    return lacking


def has_result(panel: Any, query: str) -> bool:
    return panel["title"] not in EMPTY and not any(name in query for name in ONLY_IN_TROUBLE)


async def test_dashboard_queries_parse_without_data(tmp_path: Path) -> None:
    async with prometheus(tmp_path, []) as server:
        for panel in panels():
            for query in queries(panel):
                await server.query(query)
        with pytest.raises(AssertionError, match="parse error"):
            await server.query("sum by")


async def keep_busy(parts: Cluster, key: str) -> None:
    async with AsyncClient(parts.address, api_key=key) as client:
        while True:
            await asyncio.gather(*(receive(client, [n] * 40, 60) for n in range(8)))
            with pytest.raises(PromptTooLong):
                await receive(client, [1] * 100_000, 1)


def names(text: str) -> set[str]:
    return set(re.findall(r"\beverlift_[a-z_]+", text))


def known() -> set[str]:
    """Return the names of all samples."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {
        metric.name + suffix
        for metric in CATALOGUE.values()
        for suffix in suffixes.get(metric.kind, ("",))
    }


def test_dashboard_and_alerts_use_known_metrics() -> None:
    asked_for = {name for panel in panels() for query in queries(panel) for name in names(query)}
    assert len(asked_for) > 40
    assert asked_for | {n for rule in RULES for n in names(rule["expr"])} <= known()


def test_dashboard_error_rate_excludes_client_errors() -> None:
    expressions = [each["expr"] for panel in panels() for each in panel["targets"]]
    [listed] = [set(found[1].split("|")) for found in map(FORGIVEN.search, expressions) if found]
    theirs = {slug for slug, cls in BY_SLUG.items() if issubclass(cls, InvalidRequest)}
    assert theirs <= listed <= theirs | {"ok", *OTHERS_DOING}


def test_dashboard_panels_have_descriptions_and_unique_ids() -> None:
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_alerts_have_severity_summary_and_runbook_section() -> None:
    sections = re.findall(r"^## (Everlift\w+)$", RUNBOOK, re.MULTILINE)
    assert sections == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "runbook"}, rule["alert"]


def test_runbook_has_one_row_per_error() -> None:
    errors = RUNBOOK.partition("\n## Errors\n")[2]
    first_cells = re.findall(r"^\| (`.*?`) \|", errors, re.MULTILINE)
    documented = Counter(slug for cell in first_cells for slug in re.findall(r"\w+", cell))
    assert documented == Counter(BY_SLUG.keys())


def test_runbook_and_guides_name_only_existing_alerts() -> None:
    texts = [RUNBOOK, *(guide.read_text() for guide in (DEPLOY / "guides").glob("*.md"))]
    named = {name for text in texts for name in re.findall(r"\bEverlift[A-Z]\w+", text)}
    assert named == {rule["alert"] for rule in RULES}


def test_alerts_have_firing_and_silent_tests() -> None:
    checks = [check for test in TESTED for check in test["alert_rule_test"]]
    loud = {check["alertname"] for check in checks if check.get("exp_alerts")}
    silent = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    alerts = {rule["alert"] for rule in RULES}
    assert loud == silent == alerts


@pytest.mark.parametrize(("command", "file"), [("check", "alerts"), ("test", "alerts_test")])
def test_promtool_accepts_alert_rules_and_tests(command: str, file: str) -> None:
    path = ALERTS.with_name(f"{file}.yaml")
    done = subprocess.run([found("promtool"), command, "rules", path], capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
