"""The product's modules import each other without cycles, imports for type checking included."""

from __future__ import annotations

from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter

import grimp


def imports() -> Mapping[str, Set[str]]:
    graph = grimp.build_graph("cluster", "router", "worker", "everlift", cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def cycle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Return the modules of a cycle, the first one again at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_cycle_finds_an_import_cycle() -> None:
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_product_has_no_import_cycle() -> None:
    graph = imports()
    assert len(graph) > 100
    assert cycle(graph) == []
