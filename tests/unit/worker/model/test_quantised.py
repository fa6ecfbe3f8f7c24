"""Quantised checkpoints: logits of the weights that their formats define, on 1, 2 and 4 ranks."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.support.example_counts import long, one_in
from tests.support.worker.decoder_steps import Step, SteppedDecoder
from tests.support.worker.families import (
    CHECKPOINTS,
    Checkpoint,
    all_logits,
    load_family,
    save_family,
)
from tests.support.worker.llama_support import SIZES, save_llama
from tests.support.worker.packings import panels_or_skip
from tests.support.worker.quantised_files import (
    FORMATS,
    Format,
    compressed_config,
    save_mxfp4,
    save_quantised,
)
from worker.model.checkpoint import BadCheckpoint
from worker.model.decoder import Decoder
from worker.model.huggingface.config import HfConfig
from worker.model.huggingface.families import read_spec
from worker.model.huggingface.quantization import read_format
from worker.model.kernel_linear import KernelLinear, KernelPacking
from worker.model.layers import Placement
from worker.model.matrix import Matrix, Plain, are_close
from worker.model.onednn import OneDnnPacking
from worker.model.quantised import Block, Quantised
from worker.model.spec import UnsupportedModel
from worker.model.stack import CompiledStack
from worker.model.weight_format import CodeType, WeightFormat
from worker.model.weights import with_stored_scales
from worker.parallel.group import Group
from worker.runner.build import check_device, optimize_for_gpu

LENGTHS = (40, 9, 23)


def with_inputs(**inputs: Any) -> dict[str, Any]:
    """Return a configuration with FP8 weights, and with quantised inputs."""
    config = compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")
    config["config_groups"]["group_0"]["input_activations"] = inputs
    return config


@pytest.fixture(params=one_in(2, FORMATS), ids=FORMATS, scope="module")
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return directories of a model with dequantised weights, and of the model in one format."""
    root = tmp_path_factory.mktemp("model")
    # AWQ and GPTQ need sizes that are multiples of 8.
    plain = save_llama(root / "plain", intermediate_size=104, num_hidden_layers=2)
    return [plain, save_quantised(plain, root / "quantised", FORMATS[request.param])]


@pytest.fixture(scope="module")
def expected(files: list[Path]) -> list[Tensor]:
    model = load_family(files[0])
    return [all_logits(model, sequence) for sequence in sequences()]


def sequences() -> list[list[int]]:
    rng = Random(1)
    return [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(length)] for length in LENGTHS]


#: (sequence, tokens) of each step: one prefill, chunks, final decodes, decodes beside chunks.
STEPS: list[list[Step]] = [
    [list(enumerate(LENGTHS))],
    [[(i, min(13, n - at)) for i, n in enumerate(LENGTHS) if at < n] for at in range(0, 40, 13)],
    [[(i, n - 4) for i, n in enumerate(LENGTHS)], *([(0, 1), (1, 1), (2, 1)] for _ in range(4))],
    [[(0, 12), (1, 8)], [(1, 1), (0, 28), (2, 22)], [(2, 1)]],
]


def test_quantised_logits_match_dequantised(files: list[Path], expected: list[Tensor]) -> None:
    decoder = SteppedDecoder(files[1], 64)
    assert isinstance(decoder.decoder.stack, CompiledStack)
    for steps in STEPS:
        check(decoder.logits(sequences(), steps), expected)


@pytest.mark.parametrize("size", [2, 4])
def test_quantised_ranks_match_dequantised(
    size: int, files: list[Path], expected: list[Tensor]
) -> None:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as ranks:
        logits = ranks.map(
            lambda rank: SteppedDecoder(files[1], 64, ThreadRank(rank, meeting)).logits(
                sequences(), STEPS[3]
            ),
            range(size),
        )
        check(next(logits), expected)


#: Fused layers, and experts with and without a shared one; head_dim is that of ``files``.
FAMILIES = {
    "fp8, block": Checkpoint("phi3", 6, 2, 12),
    "packed int4, zeros": replace(
        CHECKPOINTS["qwen2_moe, a dense layer"], heads=6, kv_heads=2, head_dim=12
    ),
    "gptq": Checkpoint(
        "qwen3_moe",
        *(6, 2, 12),
        {
            "hidden_size": 48,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
}


@pytest.mark.parametrize("form", one_in(3, FAMILIES), ids=FAMILIES)
def test_quantised_family_logits_match_dequantised(form: str, tmp_path: Path) -> None:
    plain = save_family(tmp_path / "plain", FAMILIES[form])
    directory = save_quantised(plain, tmp_path / "quantised", FORMATS[form])
    model = load_family(plain)
    decoder = SteppedDecoder(directory, 64)
    assert isinstance(decoder.decoder.stack, CompiledStack)
    check(decoder.logits(sequences(), STEPS[3]), [all_logits(model, s) for s in sequences()])


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return directories of a gpt-oss model with dequantised experts, and of the model in MXFP4."""
    root = tmp_path_factory.mktemp("mxfp4")
    sizes = CHECKPOINTS["gpt_oss"].sizes | {"hidden_size": 64, "intermediate_size": 96}
    plain = save_family(root / "plain", replace(CHECKPOINTS["gpt_oss"], sizes=sizes))
    return [plain, save_mxfp4(plain, root / "quantised")]


@pytest.mark.parametrize("size", [long(1), 2, long(4)])
def test_mxfp4_logits_match_dequantised(size: int, mxfp4: list[Path]) -> None:
    model, meeting = load_family(mxfp4[0]), Meeting(size)
    expected = [all_logits(model, sequence) for sequence in sequences()]
    for steps in STEPS if size == 1 else STEPS[3:]:
        with ThreadPoolExecutor(size) as ranks:
            group = [
                ThreadRank(rank, meeting) if size > 1 else Group.single() for rank in range(size)
            ]
            # Made outside of the threads: concurrent loads of one library would make two kernels.
            decoders = [SteppedDecoder(mxfp4[1], 64, rank) for rank in group]
            logits = ranks.map(lambda it: it.logits(sequences(), steps), decoders)  # noqa: B023
            check(next(logits), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted on a CPU alone")
def test_mxfp4_logits_by_kernels_match_dequantised(mxfp4: list[Path]) -> None:
    sequence = sequences()[1][:1]
    decoder = SteppedDecoder(mxfp4[1], 64, packing=KernelPacking(4, has_fp8=False))
    assert decoder.decoder.has_fixed_shapes
    logits = decoder.logits([sequence], [[(0, len(sequence))]])
    check(logits, [all_logits(load_family(mxfp4[0]), sequence)])


def test_load_rejects_exponent_of_nan(mxfp4: list[Path], tmp_path: Path) -> None:
    shutil.copytree(mxfp4[1], tmp_path / "bad")
    stored = load_file(mxfp4[1] / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    stored[name][3, 2, 1] = 255
    save_file(stored, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=f"{name} has scales that are infinite or NaN"):
        SteppedDecoder(tmp_path / "bad", 64)


def test_read_spec_rejects_incomplete_groups(mxfp4: list[Path], tmp_path: Path) -> None:
    config = json.loads((mxfp4[1] / "config.json").read_text()) | {"intermediate_size": 112}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="intermediate_size 112 are multiples of 32"):
        read_spec(tmp_path)


def test_mxfp4_memory_is_that_of_stored_tensors(mxfp4: list[Path]) -> None:
    decoder = Decoder(
        read_spec(mxfp4[1]), 64, Placement(Group.single(), torch.float32, torch.device("cpu"))
    )
    held = sum(it.into.nbytes for it in decoder.pieces() if "_blocks" in it.name)
    tensors = load_file(mxfp4[1] / "model.safetensors")
    assert held == sum(tensor.nbytes for name, tensor in tensors.items() if "_blocks" in name)


def check(logits: list[Tensor] | None, expected: list[Tensor]) -> None:
    assert logits is not None
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


class Meeting:
    """Rendezvous of ranks in threads of this process, for collectives."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part.clone()
        self.barrier.wait()
        parts = [part for part in self.parts if part is not None]
        self.barrier.wait()
        return parts


class ThreadRank(Group):
    on_device = False

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.parts)
        self._meeting = meeting

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._meeting.exchange(self.rank, tensor)).sum(0))

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        parts = self._meeting.exchange(self.rank, shard)
        return torch.cat(parts, dim=-1) if self.rank == 0 else None


def weight_of(codes: CodeType, group: int | None, scaled: int | None, zeros: bool) -> Quantised:
    """Return a random weight, whose sizes are no multiples of a word, a group or a panel."""
    outputs, inputs = 150, range(5, 139)
    form = WeightFormat("test", codes, "elements", group, scaled, zeros, scale_type="F16")
    block = Block("layer", (outputs, 200), range(outputs), inputs, outputs)
    weight = Quantised(form, [block], 140, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for part in (weight.values, weight.zeros):
        if part is not None:
            part.random_(256, generator=generator).bitwise_and_(0xBF)
    weight.scales.uniform_(0.5, 1.5, generator=generator)
    return weight


@pytest.mark.parametrize(
    ("codes", "group", "scaled", "zeros"),
    [
        ("int8", None, 1, False),
        ("e4m3", 20, 20, False),
        ("e4m3", None, None, False),
        ("int4", 32, 1, False),
        ("e2m1", 32, 1, False),
        ("int4", 20, 1, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_panels_are_correct_and_batch_invariant(
    codes: CodeType, group: int | None, scaled: int | None, zeros: bool, dtype: torch.dtype
) -> None:
    packing = panels_or_skip(dtype, torch.bfloat16, codes)
    weight = weight_of(codes, group, scaled, zeros)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(97, 140, generator=generator).to(dtype)
    bias = torch.randn(150, generator=generator).to(dtype)
    dequantised = weight.dequantised()
    assert not dequantised[:, 134:].any() and dequantised[:, :134].any(dim=0).all()
    expected = functional.linear(x.float(), dequantised, bias.float()).to(dtype)
    packed = packing.pack_quantised(weight)
    whole = packed.multiply(x, bias)
    assert are_close(whole, expected, 140)
    for count in (1, 2, 3, 4, 5, 6, 7, 13, 96):
        assert torch.equal(packed.multiply(x[:count], bias), whole[:count])


def test_quantised_weight_is_dequantised_without_compiler() -> None:
    matrix = Matrix(weight_of("int4", 20, 1, zeros=True))
    dequantised = matrix.quantised.dequantised() if matrix.quantised else torch.empty(0)
    matrix.pack(OneDnnPacking())
    x = torch.randn(3, 140, generator=torch.Generator().manual_seed(9))
    assert are_close(matrix.multiply(x), functional.linear(x, dequantised), 140)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", "supported: fp8, compressed-tensors"]),
        ({"quant_method": ["awq"]}, ["method ['awq'] is not supported"]),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 1e400]},
            ["weight_block_size must be a list of integers"],
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 1 << 31]},
            ["weight_block_size must be two integers from 1 to 2147483647"],
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 1 << 63},
            ["group_size must be a positive integer of at most 2147483647"],
        ),
        (
            {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["re:("]},
            ["modules_to_not_convert: 're:(' is not a regular expression: missing )"],
        ),
        (
            {"quant_method": "awq", "bits": 4, "modules_to_not_convert": [f"re:{'(' * 3000}"]},
            ["is not a regular expression: maximum recursion depth exceeded"],
        ),
        (
            compressed_config("pack-quantized", num_bits=4, strategy="channel")
            | {"transform_config": {"config_groups": {"v": {"type": "hadamard"}}}},
            ["compressed-tensors with a transform_config"],
        ),
        (
            compressed_config("int-quantized", num_bits=[8], strategy="channel"),
            ["weights of [8] bits"],
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt 'e5m2'", "e4m3"]),
        ({"quant_method": "awq", "bits": 8}, ["awq with bits 8", "supported: 4"]),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, ["awq version 'marlin'"]),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, ["awq without zero points"]),
        ({"quant_method": "gptq", "bits": 3}, ["gptq with bits 3", "supported: 4, 8"]),
        ({"quant_method": "gptq", "bits": 8, "sym": False}, ["gptq int8", "zero points"]),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, ["gptq with lm_head"]),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
            ["0 config_groups"],
        ),
        (
            compressed_config("nvfp4-pack-quantized", num_bits=4, type="float"),
            ["'nvfp4-pack-quantized'", "4 bits", "supported: float-quantized (8 bits, float)"],
        ),
        (
            compressed_config("int-quantized", num_bits=8, strategy="channel", symmetric=False),
            ["int8", "zero points", "only int4"],
        ),
        (
            compressed_config("pack-quantized", num_bits=4, strategy="group", actorder="group"),
            ["actorder 'group'"],
        ),
        (
            compressed_config("float-quantized", num_bits=8, type="float", strategy="token"),
            ["strategy 'token'", "tensor, channel, group, block"],
        ),
    ],
)
def test_read_format_names_unsupported_format(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read_format(HfConfig({"quantization_config": changes}, "config.json"))
    assert all(word in str(refused.value) for word in words), refused.value


def test_check_device_names_format_that_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    form = read_format(HfConfig({"quantization_config": FORMATS["awq"].config}, "config.json"))
    assert form is not None
    half, cpu, gpu = torch.float16, torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("worker.runner.build.why_no_kernels", lambda _: "no compiler")
    check_device(form, half, cpu)
    with pytest.raises(UnsupportedModel, match=r"awq int4 weights .* on cuda .*: no compiler"):
        check_device(form, half, gpu)
    monkeypatch.setattr("worker.runner.build.why_no_kernels", lambda _: "")
    packing = SimpleNamespace(why_not=lambda *_: "it differs")
    monkeypatch.setattr("worker.runner.build._kernel_packing", lambda _: packing)
    with pytest.raises(UnsupportedModel, match=r"awq int4 weights .* on cuda .*: it differs"):
        check_device(form, half, gpu)
    packing.why_not = lambda *_: ""
    check_device(form, half, gpu)


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 0), False), ((8, 9), True)])
def test_gpu_quantises_inputs_to_fp8_if_it_multiplies_them(
    capability: tuple[int, int], has_fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = save_llama(tmp_path / "plain", intermediate_size=104, num_hidden_layers=1)
    directory = save_quantised(plain, tmp_path / "quantised", FORMATS["fp8, tensor"])
    place = Placement(Group.single(), torch.float16, torch.device("cpu"))
    decoder = Decoder(with_stored_scales(read_spec(directory), directory), 64, place)
    major, minor = capability
    facts = SimpleNamespace(major=major, minor=minor, multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr("worker.runner.build.kernels_work", lambda _: True)
    optimize_for_gpu(decoder, torch.device("cuda"))
    form = decoder.layer_by_layer.layers[0].attention.qkv.weight.form
    assert isinstance(form, KernelLinear)
    assert form.fp8 == has_fp8
    assert isinstance(decoder.layer_by_layer.head.weight.form, Plain)


@pytest.mark.parametrize(
    ("changes", "has_fp8"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, False),
        (compressed_config("float-quantized", num_bits=8, type="float", strategy="channel"), False),
        (with_inputs(num_bits=8, type="float", dynamic=True, strategy="token"), True),
        (with_inputs(num_bits=8, type="float", dynamic=False, strategy="tensor"), False),
    ],
)
def test_read_format_tells_whether_inputs_are_fp8(changes: dict[str, Any], has_fp8: bool) -> None:
    form = read_format(HfConfig({"quantization_config": changes}, "config.json"))
    assert form is not None
    assert form.fp8_activations == has_fp8


@pytest.mark.parametrize(
    ("form", "tensor", "change", "cause"),
    [
        ("fp8, tensor", "weight_scale", lambda it: it * torch.nan, "has scales that are infinite"),
        ("awq", "scales", lambda it: it * torch.inf, "has scales that are infinite or NaN"),
        ("fp8, block", "weight", lambda it: torch.full_like(it, torch.nan), "has weights that are"),
        ("gptq", "g_idx", lambda it: it.float(), "is F32; supported: I32"),
        ("gptq", "g_idx", lambda it: it[40].clone(), "orders the inputs by activation"),
    ],
)
def test_load_rejects_bad_quantised_values(
    form: str, tensor: str, change: Callable[[Tensor], Tensor], cause: str, tmp_path: Path
) -> None:
    plain = save_llama(tmp_path / "plain", intermediate_size=104, num_hidden_layers=1)
    directory = save_quantised(plain, tmp_path / "quantised", FORMATS[form])
    stored = load_file(directory / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{tensor}"
    stored[name] = change(stored[name])
    save_file(stored, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=f"{name} {cause}"):
        SteppedDecoder(directory, 64)


@pytest.mark.parametrize("tensor", ["g_idx", "bias"])
def test_load_rejects_gptq_tensor_that_products_need(tensor: str, tmp_path: Path) -> None:
    plain = save_llama(tmp_path / "plain", intermediate_size=104, num_hidden_layers=1)
    directory = save_quantised(plain, tmp_path / "quantised", FORMATS["gptq"])
    stored = load_file(directory / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{tensor}"
    stored[name] = stored[name].roll(1) if tensor == "g_idx" else stored[name] + 1
    save_file(stored, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=name):
        SteppedDecoder(directory, 64)


def test_load_ignores_biases_of_a_vision_tower(tmp_path: Path) -> None:
    plain = save_family(tmp_path / "plain", CHECKPOINTS["gemma3 that could see"])
    directory = save_quantised(plain, tmp_path / "quantised", FORMATS["gptq"])
    stored = load_file(directory / "model.safetensors")
    assert any(it.any() for name, it in stored.items() if re.match(r".*vision.*\.bias$", name))
    logits = SteppedDecoder(directory, 64).logits([[7, 8, 9, 10]], [[(0, 4)]])[0]
    expected = SteppedDecoder(plain, 64).logits([[7, 8, 9, 10]], [[(0, 4)]])[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_layers_of_one_product_are_quantised_together(tmp_path: Path) -> None:
    plain = save_llama(tmp_path / "plain", intermediate_size=104, num_hidden_layers=1)
    form = FORMATS["awq"]
    config = form.config | {"modules_to_not_convert": ["q_proj"]}
    directory = save_quantised(plain, tmp_path / "quantised", Format(config, form.quantise))
    with pytest.raises(UnsupportedModel, match=r"q_proj.*k_proj.*must be quantised together"):
        SteppedDecoder(directory, 64)


def test_memory_of_quantised_weight_is_that_of_stored_tensors(files: list[Path]) -> None:
    spec = with_stored_scales(read_spec(files[1]), files[1])
    decoder = Decoder(spec, 64, Placement(Group.single(), torch.float32, torch.device("cpu")))
    held = sum(piece.into.nbytes for piece in decoder.pieces())
    stored = sum(tensor.nbytes for tensor in load_file(files[1] / "model.safetensors").values())
    # Small weights take more memory: each group begins with a new word, and outputs are padded.
    assert held <= 1.35 * stored
