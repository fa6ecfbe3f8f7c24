"""Rank of a tensor-parallel engine: python -m tests.support.worker.tensor_parallel_rank TASK.

TASK is JSON: {"store", "rank", "size", "shares_memory", "models": [directory, ...], "prompts",
"families": [directory, ...], "adapted": {family: its adapters}, "logits": directory}.

The rank prints JSON: {"outputs": {model: tokens of each prompt}, "ahead": the same with steps
launched ahead, "sampled": tokens of sampled_jobs() by the first model, in both ways,
"parameter_bytes": {model or family: n}}.

Rank 0 saves each family's logits of all prompts under "logits", in a file with the directory's
name. Logits with adapters have the suffix .adapted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from everlift.end_tokens import end_token_ids
from tests.support.worker.decoder_steps import Step, SteppedDecoder
from tests.support.worker.sampled_jobs import sampled_jobs
from tests.support.worker.tensor_parallel_worker import NUM_BLOCKS
from tests.support.worker.torch_engine import TorchEngine, greedy_jobs
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.layers import Placement
from worker.parallel import collectives
from worker.parallel.group import Group, init_group, join_store

CPU = torch.device("cpu")
#: Address 127.0.0.1 in /proc/net/tcp.
LOOPBACK = "0100007F"
MAX_POSITION = 256


def main(task: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    store = join_store(task["store"])
    if not task["shares_memory"]:
        collectives.init_collectives = lambda *_: None
    group = init_group(store, task["rank"], task["size"], CPU)
    jobs = greedy_jobs(task["prompts"], max_tokens=24)
    models, families = task["models"], task["families"]
    for family in families:
        save_logits(Path(family), task, group)
    for family, adapters in task["adapted"].items():
        save_logits(Path(family), task, group, adapters)
    result = {
        "outputs": {m: engine(m, group).serve(jobs) for m in models},
        "ahead": {m: engine(m, group, ahead=True).serve(jobs) for m in models},
        "sampled": [sampled(models[0], group, ahead) for ahead in (False, True)],
        "parameter_bytes": {m: parameter_bytes(m, group) for m in [*models, *families]},
    }
    group.barrier()
    group.close()
    return result


def engine(model: str, group: Group, ahead: bool = False) -> TorchEngine:
    return TorchEngine(Path(model), NUM_BLOCKS, group, ahead)


def sampled(model: str, group: Group, ahead: bool) -> list[list[int]]:
    spec = read_spec(model)
    return engine(model, group, ahead).serve(
        sampled_jobs(spec.vocab_size, *end_token_ids(Path(model)))
    )


def save_logits(
    family: Path, task: dict[str, Any], group: Group, adapters: Sequence[str] = ()
) -> None:
    logits = adapted_logits(family, task["prompts"], group, adapters)
    if logits is not None:
        named = {str(i): part.contiguous() for i, part in enumerate(logits)}
        suffix = ".adapted" if adapters else ""
        save_file(named, Path(task["logits"]) / f"{family.name}{suffix}")


def adapted_logits(
    family: Path, prompts: list[list[int]], group: Group, adapters: Sequence[str]
) -> list[Tensor] | None:
    """Return logits of the prompts, each with another adapter or none; see SteppedModel.logits."""
    decoder = SteppedDecoder(family, MAX_POSITION, group, adapters=adapters)
    numbers = [i % (len(adapters) + 1) for i in range(len(prompts))]
    return decoder.logits(prompts, steps(prompts), numbers if adapters else None)


def steps(prompts: list[list[int]]) -> list[Step]:
    """Return three steps: a chunk of every prompt, the rest but the last token, and that token."""
    chunks = [(i, min(20, len(prompt) - 1)) for i, prompt in enumerate(prompts)]
    rest = [(i, len(prompts[i]) - 1 - count) for i, count in chunks]
    rows = (chunks, rest, [(i, 1) for i in range(len(prompts))])
    return [[(i, count) for i, count in step if count] for step in rows]


def parameter_bytes(model: str, group: Group) -> int:
    decoder = Decoder(read_spec(model), 64, Placement(group, torch.float32, CPU))
    return sum(piece.into.nbytes for piece in decoder.pieces())


def listening() -> set[tuple[str, str]]:
    """Return address and port of this process's listening TCP sockets, as in /proc/net/tcp."""
    links = (link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                address, port = fields[1].split(":")
                found.add((address, port))
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
