"""Counters of prompts by tenant, and the bound on their labels."""

from __future__ import annotations

from router.observability.metrics.catalogue import MAX_TENANTS, OTHER_TENANTS
from router.observability.metrics.instruments import Instruments

PROMPTS = "everlift_tenant_prompt_tokens_total"
HITS = "everlift_tenant_prefix_hit_tokens_total"


def counted(instruments: Instruments, name: str) -> dict[str, float]:
    samples = instruments.samples(name)
    return {it.labels["tenant"]: it.value for it in samples if it.name == name}


def test_tenant_counters_sum_prompts_and_hits() -> None:
    instruments = Instruments()
    for priority, cached in ((0, 0), (1, 64)):
        instruments.of_class("m", priority).prefix_looked_up("acme", 100, cached)
    assert counted(instruments, PROMPTS) == {"acme": 200}
    assert counted(instruments, HITS) == {"acme": 64}


def test_tenant_labels_are_bounded() -> None:
    instruments = Instruments()
    for _ in range(2):
        for number in range(MAX_TENANTS + 20):
            instruments.prefix_looked_up(f"t{number}", 10, 1)
    prompts = counted(instruments, PROMPTS)
    assert len(prompts) == MAX_TENANTS + 1
    assert prompts["t0"] == prompts[f"t{MAX_TENANTS - 1}"] == 20
    assert prompts[OTHER_TENANTS] == 2 * 20 * 10
    assert counted(instruments, HITS)[OTHER_TENANTS] == 2 * 20


def test_requests_without_a_tenant_have_no_series() -> None:
    instruments = Instruments()
    instruments.prefix_looked_up("", 10, 1)
    assert counted(instruments, PROMPTS) == {}
