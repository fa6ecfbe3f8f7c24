"""Tokens of sequences with LoRA adapters in the engine equal those of peft.

The runs include batching, preemption, swap, drafts, prefix-cache hits and interruptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from everlift.sampling import SamplingParams
from tests.support.worker.families import Checkpoint
from tests.support.worker.llama_support import SIZES, generate, load_llama, save_llama
from tests.support.worker.peft_adapters import SETTINGS, peft_model, save_adapters
from tests.support.worker.torch_engine import Job, TorchEngine
from worker.config import Speculation
from worker.model.adapters import BadAdapter

PLENTY = 200
#: KV blocks: enough for each sequence alone, too few for a batch.
TINY = 18
NAMES = ("", *SETTINGS)
MAX_TOKENS = 40
CUTS = (1, 16, 31, 39)


@dataclass(frozen=True)
class Model:
    directory: Path
    adapters: tuple[str, ...]

    def engine(self, num_blocks: int = PLENTY, **settings: Any) -> TorchEngine:
        return TorchEngine(self.directory, num_blocks, adapters=self.adapters, **settings)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("lora")
    directory = save_llama(root / "model")
    checkpoint = Checkpoint("llama", 1, 1, 1)
    return Model(directory, tuple(save_adapters(root, directory, checkpoint)))


def jobs(temperature: float = 0.0) -> list[Job]:
    """Return jobs of all prompts with all adapters.

    Prompts share prefixes, and have repetitions, so that drafts are tried.
    """
    rng = Random(5)
    first = [rng.randrange(6, SIZES["vocab_size"]) for _ in range(40)] * 2
    prompts = [first, [*first[:70], 7, 8], first[:33], [9] * 5]
    pairs = [(prompt, name) for prompt in prompts for name in NAMES]
    return [
        Job(prompt, MAX_TOKENS, SamplingParams(temperature=temperature, seed=seed), name)
        for seed, (prompt, name) in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def outputs(model: Model) -> list[list[int]]:
    """Outputs of the greedy jobs, each in a separate engine."""
    return [model.engine().serve([job])[0] for job in jobs()]


def test_adapted_tokens_match_peft(model: Model, outputs: list[list[int]]) -> None:
    models = {"": load_llama(model.directory)}
    for text in model.adapters:
        name, _, directory = text.partition("=")
        models[name] = peft_model(model.directory, Path(directory))
    near_ties = 0
    for job, output in zip(jobs(), outputs, strict=True):
        reference = generate(models[job.adapter], job.prompt, MAX_TOKENS)
        near_ties += reference.near_ties(output)
    assert near_ties <= 1
    assert len({tuple(output) for output in outputs[: len(NAMES)]}) == len(NAMES)


SETTINGS_OF_ENGINES: dict[str, dict[str, Any]] = {
    "plenty": {"num_blocks": PLENTY},
    "preemption": {"num_blocks": TINY},
    "ahead": {"num_blocks": TINY, "ahead": True},
    "swap and drafts": {
        "num_blocks": TINY,
        "preemption": "swap",
        "swap_mib": 1,
        "speculation": Speculation(num_draft_tokens=3),
    },
}


@pytest.mark.parametrize("settings", SETTINGS_OF_ENGINES.values(), ids=SETTINGS_OF_ENGINES)
def test_batch_of_adapters_keeps_the_tokens(
    settings: dict[str, Any], model: Model, outputs: list[list[int]]
) -> None:
    engine = model.engine(**settings)
    assert engine.serve(jobs()) == outputs
    assert (engine.preemptions > 0) == (settings["num_blocks"] == TINY)
    assert any(engine.first_position(job) > 0 for job in jobs())
    if "speculation" in settings:
        assert engine.accepted_drafts > 0 and engine.counters.blocks_swapped_in > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continuation_with_an_adapter_is_exact(temperature: float, model: Model) -> None:
    all_jobs = jobs(temperature)[:8]
    whole = model.engine().serve(all_jobs)
    for cut in CUTS:
        rests = [
            replace(job, output=tuple(output[:cut]))
            for job, output in zip(all_jobs, whole, strict=True)
            if len(output) > cut
        ]
        expected = [output[cut:] for output in whole if len(output) > cut]
        assert len({rest.adapter for rest in rests}) == len(NAMES)
        assert model.engine(TINY).serve(rests) == expected


def test_engine_limits_name_the_adapters(model: Model) -> None:
    digests = model.engine()._limits.adapters
    assert [*digests] == [*SETTINGS] and len({*digests.values()}) == len(SETTINGS)


def test_adapter_of_another_model_fails_the_start(model: Model, tmp_path: Path) -> None:
    other = save_llama(tmp_path, intermediate_size=80)
    with pytest.raises(BadAdapter, match=r"adapter 'all': .* has lora_A \(5, 7\d\) .* require"):
        TorchEngine(other, PLENTY, adapters=model.adapters)
