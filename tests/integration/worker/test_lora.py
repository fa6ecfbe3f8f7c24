"""LoRA adapters: logits equal to those of peft, for any split of the tokens into steps.

A row has the same bits for any adapters of the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.worker.test_families import chunked, decoded, mixed, sequences, whole
from tests.support.example_counts import long, one_in
from tests.support.worker.decoder_steps import Step, SteppedDecoder
from tests.support.worker.families import (
    CHECKPOINTS,
    MAX_POSITION,
    all_logits,
    load_family,
    save_family,
)
from tests.support.worker.packings import panels_or_skip
from tests.support.worker.peft_adapters import NUMBERS, peft_model, save_adapters
from tests.support.worker.quantised_files import FORMATS, save_quantised
from worker.model.adapter_weights import packed_adapter
from worker.model.adapters import read_adapters
from worker.model.huggingface.families import read_spec
from worker.model.lora import LinearAdapters
from worker.model.stack import CompiledStack

FP32, BF16 = torch.float32, torch.bfloat16
#: Features: separate and fused layers, biases, norms after a branch, scale factors, a mixture of
#: experts, and a vision tower that is not loaded.
NAMES = (
    "llama, biases, llama3 rope",
    "qwen3, tied, mixed layers",
    "gemma2, softcaps",
    "gemma3 that could see",
    "phi3, part of a head, long longrope",
    "granite, biases",
    "qwen2_moe, a dense layer",
)
#: Adapter of each sequence.
ADAPTERS = ("all", "", "patterns", "few", "all")
NUMBERED = [NUMBERS[name] for name in ADAPTERS]


@dataclass(frozen=True)
class Saved:
    model: Path
    adapters: list[str]

    def stepped(self, dtype: torch.dtype = FP32, **options: torch.dtype) -> SteppedDecoder:
        return SteppedDecoder(
            self.model, MAX_POSITION, dtype=dtype, adapters=self.adapters, **options
        )


@pytest.fixture(autouse=True, params=[long(1), 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=one_in(2, NAMES), ids=NAMES, scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    checkpoint = CHECKPOINTS[request.param]
    model = save_family(tmp_path_factory.mktemp("model"), checkpoint)
    return Saved(model, save_adapters(tmp_path_factory.mktemp("adapters"), model, checkpoint))


@pytest.fixture(scope="module")
def expected(saved: Saved) -> list[Tensor]:
    models = {"": load_family(saved.model)}
    for text in saved.adapters:
        name, _, directory = text.partition("=")
        models[name] = peft_model(saved.model, Path(directory))
    pairs = zip(ADAPTERS, sequences(), strict=True)
    return [all_logits(models[name], sequence) for name, sequence in pairs]


@pytest.fixture(params=["compiled", "layer by layer", long("torch")])
def stepped(
    request: pytest.FixtureRequest, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> SteppedDecoder:
    if request.param == "torch":
        monkeypatch.setattr("worker.model.lora.lora_library", lambda dtype: None)
    stepped = saved.stepped()
    if request.param == "layer by layer":
        stepped.decoder.stack = stepped.decoder.layer_by_layer
    else:
        assert isinstance(stepped.decoder.stack, CompiledStack) == (request.param == "compiled")
    return stepped


@pytest.mark.parametrize("steps", [whole, long(chunked), long(decoded), mixed])
def test_adapted_logits_match_peft(
    steps: Callable[[], list[Step]], stepped: SteppedDecoder, expected: list[Tensor]
) -> None:
    logits = stepped.logits(sequences(), steps(), NUMBERED)
    assert logits is not None
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_reserved_bytes_suffice_for_adapters_in_all_slots(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.model.lora.lora_library", lambda dtype: None)
    stepped = SteppedDecoder(
        saved.model, MAX_POSITION, dtype=FP32, adapters=saved.adapters[:1], num_slots=2
    )
    decoder, [adapter] = stepped.decoder, read_adapters(saved.adapters[:1], saved.model)
    packed = packed_adapter(decoder, stepped.spec, adapter)
    num_bytes = sum(parts.num_bytes for parts in packed)
    if stepped.spec.has_experts:  # the adapter does not change the dense layer
        assert decoder.reserved_adapter_bytes(adapter.rank) > num_bytes
        return
    assert decoder.reserved_adapter_bytes(adapter.rank) == num_bytes
    decoder.place_adapter(2, packed)
    assert decoder.reserved_adapter_bytes(adapter.rank) == 0
    assert decoder.reserved_adapter_bytes(2 * adapter.rank) == 2 * num_bytes


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_adapted_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, saved: Saved) -> None:
    """Rows run alone and with others, in chunks and whole, compiled and layer by layer."""
    stepped = saved.stepped(dtype)
    together = stepped.logits(sequences(), mixed(), NUMBERED)
    others = stepped.logits(sequences(), whole(), [*NUMBERED[:1], 1, 2, 3, 0])
    assert together is not None and others is not None
    assert torch.equal(others[0], together[0])
    assert not torch.equal(others[1], together[1])
    for sequence, number, logits in zip(sequences(), NUMBERED, together, strict=True):
        alone = stepped.logits([sequence], [[(0, len(sequence))]], [number])
        assert alone is not None and torch.equal(alone[0], logits)
    stepped.decoder.stack = stepped.decoder.layer_by_layer
    separate = stepped.logits(sequences(), chunked(), NUMBERED)
    assert separate is not None
    assert all(torch.equal(*each) for each in zip(separate, together, strict=True))


@pytest.mark.parametrize("packed", [BF16, torch.int8])
def test_adapters_add_to_narrow_weights(packed: torch.dtype, saved: Saved) -> None:
    panels_or_skip(FP32, packed)
    if packed == torch.int8 and "num_experts" in (saved.model / "config.json").read_text():
        pytest.skip("mixtures of experts are not quantised")
    stepped = saved.stepped(weights_dtype=BF16, packed=packed)
    got = stepped.logits(sequences(), mixed(), NUMBERED)
    stepped.decoder.stack = stepped.decoder.layer_by_layer
    expected = stepped.logits(sequences(), whole(), NUMBERED)
    assert got is not None and expected is not None
    assert all(torch.equal(*each) for each in zip(got, expected, strict=True))


@pytest.mark.parametrize("form", ["fp8, block", "int8, channel", "awq"])
def test_adapters_add_to_quantised_checkpoint(form: str, tmp_path: Path) -> None:
    base = CHECKPOINTS["llama, tied, linear rope"]
    # AWQ needs sizes that are multiples of 8.
    checkpoint = replace(base, sizes=base.sizes | {"intermediate_size": 104})
    plain = save_family(tmp_path / "plain", checkpoint)
    model = save_quantised(plain, tmp_path / "quantised", FORMATS[form])
    saved = Saved(model, save_adapters(tmp_path / "adapters", plain, checkpoint))
    stepped = saved.stepped()
    assert isinstance(stepped.decoder.stack, CompiledStack)
    logits = stepped.logits(sequences(), mixed(), NUMBERED)
    assert logits is not None
    models = {name: peft_model(plain, tmp_path / "adapters" / name) for name in ADAPTERS if name}
    models[""] = load_family(plain)
    for name, sequence, got in zip(ADAPTERS, sequences(), logits, strict=True):
        expected = all_logits(models[name], sequence)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_hidden_states_of_adapted_sites_equal_those_of_all(saved: Saved) -> None:
    stepped = saved.stepped()
    of_all = stepped.hidden(sequences(), None, NUMBERED)
    for sites in ([], [0], [99, 144, 177, 247, 256], [3, 100, 140, 150, 180, 256]):
        assert torch.equal(stepped.hidden(sequences(), sites, NUMBERED), of_all[sites]), sites


def test_step_without_adapters_calls_no_update(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = saved.stepped()
    base = stepped.logits(sequences(), whole(), [0] * len(NUMBERED))
    stepped.decoder.stack = stepped.decoder.layer_by_layer
    monkeypatch.setattr(LinearAdapters, "add", None)
    without = stepped.logits(sequences(), whole())
    assert base is not None and without is not None
    assert all(torch.equal(*each) for each in zip(base, without, strict=True))


def test_loads_and_unloads_keep_the_bits_of_other_adapters(saved: Saved) -> None:
    """Slots are filled, replaced and emptied between steps; adapters differ in rank and sites."""
    expected = saved.stepped().logits(sequences(), mixed(), NUMBERED)
    spec = read_spec(saved.model)
    adapters = {it.name: it for it in read_adapters(saved.adapters, saved.model)}
    for is_compiled in (True, False):
        stepped = SteppedDecoder(saved.model, MAX_POSITION, num_slots=2)
        decoder = stepped.decoder
        if not is_compiled:
            decoder.stack = decoder.layer_by_layer
        for name, slot in (("few", 1), ("patterns", 2), ("all", 1)):
            decoder.place_adapter(slot, packed_adapter(decoder, spec, adapters[name]))
            others = {"all": 1} | ({"patterns": 2} if name != "few" else {}) | {"": 0}
            if name != "all":
                del others["all"]
                others[name] = slot
            numbers = [others.get(it, 0) for it in ADAPTERS]
            got = stepped.logits(sequences(), mixed(), numbers)
            assert got is not None and expected is not None
            for it, one, two in zip(ADAPTERS, got, expected, strict=True):
                assert torch.equal(one, two) == (it in others)
        decoder.place_adapter(1, None)
        without = stepped.logits(sequences(), mixed(), [0, 0, 1, 1, 2])
        assert without is not None
        base = SteppedDecoder(saved.model, MAX_POSITION).logits(sequences(), mixed())
        assert base is not None and all(map(torch.equal, without[:4], base[:4]))
