"""Rank above 0 that only sums, in a process of its own.

Usage: python -m tests.support.worker.parallel_rank ADDRESS RANK SIZE PARENT. If a sum fails, the
process prints the cause and exits with status 3.
"""

from __future__ import annotations

import sys

import torch

from worker.child_process import die_with_parent
from worker.parallel.group import init_group, join_store

#: Half a MiB of float32, which is several chunks.
COUNT = 1 << 17


def main(address: str, rank: int, size: int) -> int:
    group = init_group(join_store(address), rank, size, torch.device("cpu"))
    try:
        while True:
            group.all_reduce(torch.ones(COUNT))
    except RuntimeError as error:
        print(error, flush=True)
        return 3
    finally:
        group.close()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[4]))
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
