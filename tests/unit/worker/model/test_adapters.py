"""Files of LoRA adapters, and their checks before a worker starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from cluster.config import DEMO_MODEL, Config
from cluster.errors import ClusterFailed
from cluster.model import fetched
from everlift.errors import SettingsError
from everlift.settings import load
from tests.support.worker.decoder_steps import SteppedDecoder
from tests.support.worker.lora_files import write_adapter
from worker.model.adapters import AdaptedLinear, BadAdapter, adapted_linears, read_adapters
from worker.model.huggingface.families import read_spec

VLLM = {"engine": "vllm"}


def test_read_adapters_returns_ranks_and_digests(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", DEMO_MODEL, seed=1, rank=4)
    write_adapter(tmp_path / "b", DEMO_MODEL, seed=2, rank=9)
    write_adapter(tmp_path / "again", DEMO_MODEL, seed=1, rank=4)
    texts = [f"{name}={tmp_path / name}" for name in ("a", "b", "again")]
    a, b, again = read_adapters(texts, DEMO_MODEL)
    assert (a.name, a.rank, a.directory) == ("a", 4, tmp_path / "a")
    assert b.rank == 9
    assert a.digest == again.digest != b.digest


@pytest.mark.parametrize("change", [{"seed": 3}, {"lora_alpha": 3}])
def test_digest_covers_weights_and_config(change: Mapping[str, Any], tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    [before] = read_adapters([f"a={tmp_path}"], DEMO_MODEL)
    write_adapter(tmp_path, DEMO_MODEL, **{"seed": 1, **change})
    [after] = read_adapters([f"a={tmp_path}"], DEMO_MODEL)
    assert before.digest != after.digest


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"rank": 513}, "adapter 'a': rank 513 is above the limit of 512"),
        ({"r": 0}, "must have a rank r of at least 1, not 0"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'; only LORA is supported"),
        ({"use_dora": True, "bias": "all"}, "uses use_dora, bias, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which also changes the model"),
    ],
)
def test_unsupported_adapter_is_refused(
    fields: Mapping[str, Any], cause: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1, **fields)
    with pytest.raises(BadAdapter, match=cause):
        read_adapters([f"a={tmp_path}"], DEMO_MODEL)


def test_adapter_with_empty_text_config_is_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1, text_config=None)
    [adapter] = read_adapters([f"a={tmp_path}"], DEMO_MODEL)
    assert adapter.rank == 4


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"hidden_size": 64}, r"another model: .*_proj has 128 inputs, .* hidden size is 64"),
        ({"num_hidden_layers": 3}, r"another model: it adapts layer 3, and .* has 3 layers"),
    ],
)
def test_adapter_of_another_model_is_refused(
    facts: Mapping[str, int], cause: str, tmp_path: Path
) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | facts
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_adapter(tmp_path / "a", DEMO_MODEL, seed=1)
    with pytest.raises(BadAdapter, match=cause):
        read_adapters([f"a={tmp_path / 'a'}"], tmp_path)


def test_layers_of_a_vision_tower_are_not_compared(tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.vision_tower.layers.40.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, name: torch.ones(4, 72)}, tmp_path / "adapter_model.safetensors")
    [adapter] = read_adapters([f"a={tmp_path}"], DEMO_MODEL)
    assert adapter.rank == 4


def linears(directory: Path, **config: Any) -> dict[str, AdaptedLinear]:
    """Return the linear layers of an adapter of the demo model, with settings replaced."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    [adapter] = read_adapters([f"a={directory}"], DEMO_MODEL)
    return adapted_linears(adapter, read_spec(DEMO_MODEL))


def test_adapted_linears_have_shapes_and_scaling(tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1, rank=4, lora_alpha=3)
    spec = read_spec(DEMO_MODEL)
    found = linears(tmp_path)
    assert len(found) == 4 * spec.num_layers
    up = found["layers.1.mlp.up_proj"]
    assert (up.a.shape, up.b.shape) == ((4, spec.hidden_size), (spec.intermediate_size, 4))
    assert up.scaling == 3 / 4
    patterns = {"layers.1.mlp.up_proj": 10, "up_proj": 5, ".*": 6}
    found = linears(tmp_path, use_rslora=True, alpha_pattern=patterns)
    scalings = [found[f"layers.{name}"].scaling for name in ("1.mlp.up_proj", "0.mlp.up_proj")]
    assert scalings == [10 / 2, 5 / 2] and found["layers.0.self_attn.q_proj"].scaling == 6 / 2


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (
            {"r": 5},
            r"^adapter 'a': model\.layers\.0\.\S+ has lora_A \(4, 128\) and .* rank 5 require",
        ),
        ({"rank_pattern": {"o_proj": 7}}, r"layers\.0\.self_attn\.o_proj has .* rank 7 require"),
        ({"lora_alpha": None}, "must have a number as lora_alpha, not None"),
        ({"lora_alpha": 10**400}, "must have a number as lora_alpha, not 1000"),
        ({"rank_pattern": ["o_proj"]}, r"an object as rank_pattern, not \['o_proj'\]"),
        ({"rank_pattern": {"o_proj": 0}}, r"rank of \S+o_proj must be at least 1, not 0"),
        (
            {"alpha_pattern": {"(": 1}},
            r"^adapter 'a': alpha_pattern has the malformed pattern '\(': error: unclosed group$",
        ),
        ({"rank_pattern": {f"q_proj{number}": 4 for number in range(4097)}}, "at most 4096 are"),
    ],
)
def test_adapted_linears_refuse_config(
    config: Mapping[str, Any], cause: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    with pytest.raises(BadAdapter, match=cause):
        linears(tmp_path, **config)


@pytest.mark.parametrize(
    "pattern",
    ["a{99999999999}", r"\pL", "(?=q_proj)", r"(q)\1", "(" * 3000, "q" * 257, "\ud800", "q_proj\n"],
    ids=lambda pattern: ascii(pattern[:20]),
)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_adapted_linears_refuse_unsupported_pattern(key: str, pattern: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    with pytest.raises(BadAdapter, match=rf"{key} has the pattern .* not supported: expected"):
        linears(tmp_path, **{key: {pattern: 4}})


def test_adapted_linears_match_patterns_in_linear_time(tmp_path: Path) -> None:
    """A search that backtracks would try more than 2**30 ways."""
    write_adapter(tmp_path, DEMO_MODEL, seed=1, lora_alpha=12)
    hostile = {r"([a-z_.0-9]+)+-": 1, r"(\w|.)*(\w|.)*-": 2, "(a|a|.)*" * 28 + "-": 3}
    found = linears(tmp_path, alpha_pattern=hostile)
    assert {linear.scaling for linear in found.values()} == {12 / 4}


def test_adapted_linears_refuse_long_prefix(tmp_path: Path) -> None:
    """The time of a match grows with the length of a name."""
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    layers = "model." * 5 + "layers"
    longer = {name.replace("model.layers", layers): it for name, it in tensors.items()}
    save_file(longer, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadAdapter, match=f"does not adapt {layers}"):
        linears(tmp_path)


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "proj",
        "",
        "up_proj$",
        "^model.layers.0.self_attn.q_proj",
        "^layers.0.self_attn.q_proj",
        "model.layers.2.mlp.up_proj",
        "0.self_attn.(q|v)_proj",
        r"layers\.[1-3]\..*(q|v|up)_proj",
        r".*\.layers\.(0|2)\..*",
        r"layers\.\d+\.mlp\.\w+",
        r"[\w.-]+o_proj",
        r"[^\d]*\d[^\d]*",
        "q_proj|layers.1.*|v_proj",
        "a)|(o_proj",
    ],
)
def test_adapted_linears_match_patterns_as_peft(pattern: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1, lora_alpha=8)
    found = linears(tmp_path, alpha_pattern={pattern: 20})
    for name, linear in found.items():
        is_matched = get_pattern_key([pattern], f"model.{name}") == pattern
        assert linear.scaling == (5 if is_matched else 2), name


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("lm_head.lora_A.weight", "engine does not adapt lm_head: only layers of the model"),
        ("model.embed_tokens.lora_embedding_A", "model.embed_tokens.lora_embedding_A is not supp"),
        (
            "model.layers.0.mlp.experts.3.up_proj.lora_A.weight",
            r"mlp\.experts\.3\.up_proj: only self",
        ),
        (
            "model.layers.0.mlp.gate_proj.lora_A.weight",
            "gate_proj must have both lora_A and lora_B",
        ),
        ("model.layers.0.input_layernorm.lora_B.weight", "does not adapt .*input_layernorm: only"),
        ("model.layers.01.mlp.up_proj.lora_A.weight", r"does not adapt model\.layers\.01\.mlp"),
    ],
)
def test_adapted_linears_refuse_tensor(name: str, cause: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    more = {f"base_model.model.{name}": torch.ones(4, 128)}
    save_file(tensors | more, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadAdapter, match=cause):
        linears(tmp_path)


def test_adapted_linears_refuse_integer_matrix(tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    whole = {name: tensor.to(torch.int8) for name, tensor in tensors.items()}
    save_file(whole, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadAdapter, match=r"lora_\S+ is I8; supported: F32, BF16, F16"):
        linears(tmp_path)


def test_adapted_linears_refuse_a_layer_twice(tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    again = {name.replace("model.layers", "layers"): it.clone() for name, it in tensors.items()}
    save_file(tensors | again, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadAdapter, match=r"layers\.\d\.\S+ is adapted twice"):
        linears(tmp_path)


def test_load_adapters_refuses_nan(tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1, scale=torch.nan)
    with pytest.raises(BadAdapter, match=r"lora_B\.weight has weights that are infinite or NaN"):
        SteppedDecoder(DEMO_MODEL, 64, adapters=[f"a={tmp_path}"])


@pytest.mark.parametrize("worker", [VLLM, {}], ids=["vllm", "own engine"])
async def test_bad_adapter_is_reported_before_the_start(
    worker: Mapping[str, str], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "a", DEMO_MODEL, seed=1)
    given = {"model": str(DEMO_MODEL), "worker": worker, "adapters": [f"a={tmp_path / 'a'}"]}
    config = load(Config, given)
    assert await fetched(config) == config
    (tmp_path / "a" / "adapter_config.json").write_text("[]")
    with pytest.raises(ClusterFailed, match=r"adapter 'a': .* is not a JSON object"):
        await fetched(config)


async def test_unsupported_adapter_is_reported_before_the_start(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", DEMO_MODEL, seed=1, lora_alpha="large")
    given = {"model": str(DEMO_MODEL), "adapters": [f"a={tmp_path / 'a'}"]}
    with pytest.raises(ClusterFailed, match=r"adapter 'a': .* as lora_alpha, not 'large'"):
        await fetched(load(Config, given))
    # The file is not checked for vLLM, which reads it itself.
    await fetched(load(Config, given | {"worker": VLLM}))


async def test_adapter_of_transformers_modules_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", DEMO_MODEL, seed=1)
    AutoConfig.for_model("gpt2", architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "m")
    given = {"model": str(tmp_path / "m"), "adapters": [f"a={tmp_path / 'a'}"]}
    with pytest.raises(ClusterFailed, match="not supported for models that run through"):
        await fetched(load(Config, given))


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"adapters": ["a=/x"], "model": "fake"}, "^adapters need a model; the model 'fake' has"),
        ({"adapters": ["a=/x", "a=/y"], "worker": VLLM}, "^adapters names 'a' twice"),
        ({"adapters": ["demo_model=/x"], "worker": VLLM}, "'demo_model', which model has too"),
        (
            {
                "adapters": ["gpt=/x"],
                "router": {"served_model_names": ["gpt"]},
                "worker": VLLM,
            },
            "'gpt', which router.served_model_names has too",
        ),
        ({"adapters": ["a"], "worker": VLLM}, "^adapters must be NAME=DIRECTORY"),
        ({"worker": {"adapters": ["a=/x"]}}, "adapters must be set for the whole cluster"),
    ],
)
def test_setting_adapters_is_checked(given: Mapping[str, object], cause: str) -> None:
    with pytest.raises(SettingsError, match=cause):
        load(Config, given)


def test_setting_adapters_reaches_router_and_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(Config, {"adapters": ["a=x/y@v1", "b=./z"], "worker": VLLM})
    expected = ("a=x/y@v1", f"b={tmp_path}/z")
    assert config.adapters == config.router.adapters == config.worker.adapters == expected
    changed = config.with_sources("", "", ("a=x/y@v2",))
    assert changed.router.adapters == changed.worker.adapters == ("a=x/y@v2",)
