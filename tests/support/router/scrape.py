"""Metrics of a router, read as Prometheus does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Metric, openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_parse
from prometheus_client.parser import text_string_to_metric_families as parse

PLAIN = "text/plain"


@dataclass(frozen=True)
class Samples:
    """Samples by name and labels, each of which is written ``name=value``."""

    by_labels: Mapping[tuple[str, ...], float]

    def __getitem__(self, key: tuple[str, ...]) -> float:
        """Return the sum of the samples of this name with these labels; at least one is needed."""
        name, *labels = key
        found = [
            value
            for its, value in self.by_labels.items()
            if its[0] == name and set(labels) <= set(its[1:])
        ]
        if not found:
            raise KeyError(key)
        return sum(found)

    def total(self, name: str) -> float:
        return sum(value for key, value in self.by_labels.items() if key[0] == name)

    def values(self, name: str, label: str) -> dict[str, float]:
        """Return a metric's samples by the value of one label."""
        return {
            dict(pair.split("=", 1) for pair in key[1:])[label]: value
            for key, value in self.by_labels.items()
            if key[0] == name
        }


@dataclass(frozen=True)
class Families:
    families: Mapping[str, Metric]

    @property
    def kinds(self) -> dict[str, str]:
        return {name: family.type for name, family in self.families.items()}

    @property
    def samples(self) -> Samples:
        return Samples(
            {
                (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
                for family in self.families.values()
                for sample in family.samples
            }
        )

    def labels(self, name: str) -> list[dict[str, str]]:
        """Return the labels of each sample of a metric, without the bounds of histograms."""
        family = self.families[name.removesuffix("_total")]
        return [
            {k: v for k, v in sample.labels.items() if k != "le"}
            for sample in family.samples
            if sample.name.startswith(name)
        ]


async def scraped(address: str, accept: str = PLAIN) -> Families:
    answer = await fetch(address, f"GET /metrics HTTP/1.1\r\nAccept: {accept}")
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n"), head
    is_open = openmetrics.exposition.CONTENT_TYPE_LATEST.partition(";")[0] in head
    assert is_open == ("openmetrics" in accept)
    families = list((open_parse if is_open else parse)(body))
    assert len({family.name for family in families}) == len(families)
    return Families({family.name: family for family in families})


async def fetch(address: str, request: str) -> str:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{request}\r\n\r\n".encode())
        return (await reader.read()).decode()
    finally:
        writer.close()
        await writer.wait_closed()
