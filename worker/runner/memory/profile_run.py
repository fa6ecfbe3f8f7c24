"""What a worker takes of its GPU's memory, beside the KV cache: it is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from worker.device.device_memory import DeviceMemory
from worker.engine.plan import Plan, Runner
from worker.parallel.group import Group
from worker.runner.memory.memory_use import MemoryUse


def profile_run(
    memory: DeviceMemory,
    runner: Runner,
    plans: Iterable[Plan],
    capture: Callable[[], object],
    scratch_bytes: int,
) -> MemoryUse:
    """The weights are loaded, and ``runner`` has a KV cache of ``scratch_bytes`` for ``plans``,
    which are not counted. ``capture`` returns what holds its graphs. All ranks do this at the same
    time. Raises ValueError where there is too little memory for the steps."""
    memory.release()
    _execute(runner, plans)
    step = memory.most_held - scratch_bytes
    graphs = _taken(memory, capture)
    memory.release()
    return MemoryUse(memory.total, memory.used - memory.held, step, graphs)


def _execute(runner: Runner, plans: Iterable[Plan]) -> None:
    for plan in plans:
        try:
            runner.execute(plan)
        except MemoryError as error:
            raise ValueError(
                f"beside the weights the GPU has too little memory for a step of {plan.num_tokens} "
                f"tokens of {len(plan.rows)} sequences: a smaller max_num_batched_tokens or "
                f"max_num_seqs needs less, or more ranks (tensor_parallel) ({error})"
            ) from error


def _taken(memory: DeviceMemory, capture: Callable[[], object]) -> int:
    """By what ``capture`` holds; it is let go."""
    memory.release()
    before = memory.used
    held = capture()
    memory.release()
    taken = memory.used - before
    del held
    return max(0, taken)


def scarcest(group: Group, use: MemoryUse, utilization: float, device: torch.device) -> MemoryUse:
    """That of the rank on which least is left, on all of them: their KV caches have as many blocks
    each. A collective."""
    gathered = group.gather_to_first(torch.tensor(use, device=device))
    chosen = use
    if gathered is not None:
        ranks = (MemoryUse(*numbers) for numbers in gathered.view(group.size, -1).tolist())
        chosen = min(ranks, key=lambda rank: rank.left(utilization))
    return MemoryUse(*group.broadcast(torch.tensor(chosen, device=device)).tolist())
