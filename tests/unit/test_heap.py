"""In a process of its own: what it does holds for the whole of one."""

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
heap.settle()
assert gc.get_freeze_count() > 5000
assert len(gc.get_objects()) < 1000
assert gc.garbage == []
assert gc.get_threshold()[:2] == before[:2]
assert gc.get_threshold()[2] > before[2]
# What is young is looked through as before.
for n in range(2 * before[0]):
    loop = []
    loop.append(loop)
    del loop
assert gc.get_count()[0] <= before[0] and gc.get_stats()[0]["collected"] > 0
"""


def test_what_a_process_has_started_with_is_not_looked_through_again() -> None:
    subprocess.run([sys.executable, "-c", SETTLED], check=True)
