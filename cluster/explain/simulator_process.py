"""One question's answer: ``python -m cluster.explain.simulator_process``.

    stdin     parent's process id, then its launch, each a line
    stdout    its answer, a line
    stderr    what nobody foresaw

It never outlives its parent, and gives way to whatever else wants a core or memory.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from typing import TYPE_CHECKING

from worker.child_process import go_first
from worker.parent import die_with_parent

if TYPE_CHECKING:
    from cluster.explain.launch import Answer, Launch

#: What it takes of a core that others want, and of memory at most.
_NICE, _MAX_MEMORY_MIB = 10, 1024


def main() -> None:
    die_with_parent(int(sys.stdin.readline()))
    _step_back()
    # It imports what takes a while.
    from cluster.explain.launch import decode, encode_answer

    print(encode_answer(asyncio.run(_answer(decode(sys.stdin.readline())))))


def _step_back() -> None:
    """What is short goes to others."""
    os.nice(_NICE)
    go_first()
    limit = _MAX_MEMORY_MIB << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


async def _answer(launch: Launch) -> Answer:
    from cluster.errors import ForecastFailed
    from cluster.explain.replayed import estimated
    from everlift.errors import EverliftError
    from everlift.settings import SettingsError
    from router.gateway.what_if import NoEstimate
    from router.ledger.redis_ledger import connect

    try:
        ledger = await connect(launch.ledger)
        try:
            return await estimated(ledger, launch.question)
        finally:
            await ledger.close()
    except (ForecastFailed, SettingsError) as error:
        return NoEstimate(str(error))
    except MemoryError:
        return NoEstimate(f"to simulate it takes more than {_MAX_MEMORY_MIB} MiB")
    except EverliftError as error:
        return error


if __name__ == "__main__":
    main()
