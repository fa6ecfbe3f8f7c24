"""Process of a rank above 0.

Arguments: ``rank``, ``rendezvous``, ``parent pid``, ``num_blocks``, and ``ahead`` if steps are
launched ahead. The exit status is 0 if rank 0 stops, otherwise 3 with the cause on standard output.
"""

from __future__ import annotations

import asyncio
import sys

from tests.support.worker.worker_support import tensor_parallel
from worker.child_process import die_with_parent
from worker.serving.rank import Rank, RankFailed


async def main(rank: int, rendezvous: str, num_blocks: int, ahead: bool) -> int:
    this = Rank(tensor_parallel(2, num_blocks, ahead), rank, rendezvous)
    await this.start()
    print("ready", flush=True)
    try:
        await this.wait()
    except RankFailed as error:
        print(error, flush=True)
        return 3
    return 0


if __name__ == "__main__":
    _, rank, rendezvous, parent, num_blocks, *ahead = sys.argv
    die_with_parent(int(parent))
    sys.exit(asyncio.run(main(int(rank), rendezvous, int(num_blocks), ahead == ["ahead"])))
