"""Garbage collection settings, in a separate process because they apply to the whole process."""

from __future__ import annotations

import subprocess
import sys

SETTLED = """
import gc
from everlift import heap
kept = [[n] for n in range(5000)]
gone = []
gone.append(gone)
del gone
before = gc.get_threshold()
heap.freeze_heap()
assert gc.get_freeze_count() > 5000
assert len(gc.get_objects()) < 1000
assert gc.garbage == []
assert gc.get_threshold()[:2] == before[:2]
assert gc.get_threshold()[2] > before[2]
# Young objects are collected as before.
for n in range(2 * before[0]):
    loop = []
    loop.append(loop)
    del loop
assert gc.get_count()[0] <= before[0] and gc.get_stats()[0]["collected"] > 0
"""


def test_freeze_heap_freezes_startup_objects() -> None:
    subprocess.run([sys.executable, "-c", SETTLED], check=True)


GROWN = """
import gc
from everlift import heap
gc.collect()
passes = sum(each["collections"] for each in gc.get_stats())
with heap.pause_gc():
    kept = [[n] for n in range(5000)]
assert gc.isenabled() and gc.get_freeze_count() == 0
assert len(gc.get_objects(generation=0)) < 1000
assert sum(each["collections"] for each in gc.get_stats()) == passes
# Objects that became garbage since are collected.
kept.append(kept)
del kept
assert gc.collect() > 5000
# The collector stays disabled, and frozen objects stay frozen.
gc.disable()
gc.freeze()
frozen = gc.get_freeze_count()
with heap.pause_gc():
    pass
assert not gc.isenabled() and gc.get_freeze_count() == frozen
"""


def test_pause_gc_suspends_collection() -> None:
    subprocess.run([sys.executable, "-c", GROWN], check=True)
