"""GGUF files: logits and tokenizer equal to those of transformers, and rejected files."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.quantization_config import GgufConfig

from everlift.chat_templates import Templates
from everlift.gguf_config import UnsupportedGguf, check_tokenizer, config_of
from everlift.gguf_directory import LINK, GgufUnusable, directory_of, write
from everlift.gguf_header import BadGguf, GgufHeader, read_gguf_header
from everlift.model_files import ModelUnavailable, fetch, locate, weight_files
from router.requests.tokenizer import ServedModel
from tests.support.worker.decoder_steps import SteppedDecoder
from tests.support.worker.families import all_logits
from tests.support.worker.gguf_files import (
    END,
    MAX_POSITION,
    MODELS,
    TEMPLATE,
    VOCAB,
    GgufModel,
    random_model,
    write_gguf,
)
from worker.model.checkpoint import BadCheckpoint
from worker.model.gguf_weights import gguf_reading, read_gguf_tensors
from worker.model.sharing import Run
from worker.native import native
from worker.serving.fingerprint import model_fingerprint

LENGTHS = (100, 45, 9)
PLAIN = MODELS["llama, Q4_1"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache" / "everlift"
    directory.mkdir(parents=True)
    # The kernels' cache is shared, because compiling them again would take 30 s.
    (directory / "native").symlink_to(native._cache())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return directory / "gguf"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "plain.gguf", PLAIN, random_model(PLAIN))


def directory_for(path: Path) -> Path:
    """Convert a file like ``directory_of``, but without a separate process."""
    directory = path.with_suffix("")
    directory.mkdir()
    write(path, directory)
    return directory


def sequences() -> list[list[int]]:
    rng = Random(1)
    return [[rng.randrange(6, VOCAB) for _ in range(length)] for length in LENGTHS]


def logits(directory: Path) -> list[Tensor]:
    whole = [list(enumerate(LENGTHS))]
    found = SteppedDecoder(directory, MAX_POSITION).logits(sequences(), whole)
    assert found is not None
    return list(found)


def expected_logits(model: PreTrainedModel, kind: GgufModel) -> list[Tensor]:
    if kind.sizes.get("original_max_position_embeddings", MAX_POSITION) < MAX_POSITION:
        # A worker that serves longer sequences uses the long factors for all sequences.
        model.config.original_max_position_embeddings = 1
        model.config.standardize_rope_params()
    return [all_logits(model, sequence) for sequence in sequences()]


@pytest.mark.parametrize("name", MODELS)
def test_gguf_logits_match_the_dequantised_model(name: str, tmp_path: Path) -> None:
    kind = MODELS[name]
    model = random_model(kind)
    directory = directory_for(write_gguf(tmp_path / "m.gguf", kind, model))
    for got, wanted in zip(logits(directory), expected_logits(model, kind), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", [name for name, kind in MODELS.items() if kind.transformers_reads])
def test_gguf_logits_match_transformers_with_the_same_file(name: str, tmp_path: Path) -> None:
    kind = MODELS[name]
    path = write_gguf(tmp_path / "m.gguf", kind, random_model(kind))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    ours = logits(directory_for(path))
    for got, wanted in zip(ours, expected_logits(theirs, kind), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", [kind for kind in Type if kind.name.endswith("_K")])
def test_k_quants_are_dequantised_like_the_gguf_library(kind: Type, tmp_path: Path) -> None:
    """The library cannot quantise to these types, so random bits are used."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 6, 2 * block
    rng = Random(1)
    stored = bytes(rng.randrange(0, 60) for _ in range(rows * 2 * block_bytes))
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "qwen2")
    _add_sizes(writer)
    data = numpy.frombuffer(stored, numpy.uint8).reshape(rows, -1)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    _add_layer(writer)
    _close(writer)
    if kind is Type.Q8_K:
        with pytest.raises(BadCheckpoint, match="Q8_K"):
            read_gguf_tensors(tmp_path / "k.gguf")
        return
    tensor = next(it for it in read_gguf_tensors(tmp_path / "k.gguf") if "embed" in it.name)
    assert tensor.shape == (rows, columns)
    wanted = torch.tensor(gguf.dequantize(data, kind)).flatten()
    parts = [Run(0, 7), Run(columns - 3, 300), Run(5 * columns + 1, columns - 1)]
    into = torch.empty(sum(part.length for part in parts))
    with (tmp_path / "k.gguf").open("rb") as file:
        gguf_reading(file.fileno(), tensor)(parts, into)
    read = torch.cat([wanted[part.start : part.start + part.length] for part in parts])
    torch.testing.assert_close(into, read, atol=0, rtol=0)


def _add_sizes(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(512)
    writer.add_feed_forward_length(512)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-5)


def _add_layer(writer: gguf.GGUFWriter) -> None:
    """Add a vocabulary, and the tensors whose sizes are compared with the metadata."""
    for name in ("attn_output", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", numpy.zeros((512, 512), numpy.float32))
    writer.add_token_list(["a"])


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.long
async def test_converted_directory_is_reused_until_the_file_changes(
    path: Path, cache: Path
) -> None:
    await fetch(str(path), weights=False)
    directory = locate(str(path), weights=True)
    assert [directory] == list(cache.iterdir()) and directory.name.startswith("plain-")
    assert weight_files(directory) == [directory / LINK]
    before = model_fingerprint(directory)
    assert locate(str(path), weights=True) == directory
    write_gguf(path, PLAIN, random_model(MODELS["llama, tied, Q8_0"]))
    changed = locate(str(path), weights=True)
    assert changed != directory and model_fingerprint(changed) != before


def test_tokenizer_and_chat_template_come_from_the_gguf_file(path: Path) -> None:
    directory = directory_for(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    templates = Templates.read(directory)
    assert templates is not None and templates.default == TEMPLATE == theirs.chat_template
    model = ServedModel.load(str(directory))
    assert model.eos_ids == (END,)
    assert model.context == MAX_POSITION
    for text in ("abcab é 日本 12", "<|im_start|>a<|im_end|>"):
        assert list(model.tokenizer.encode(text)) == theirs(text).input_ids
    named = ServedModel.load(str(path))
    assert named.name == "plain"


def test_unsupported_gguf_architecture_is_rejected_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    _close(writer)
    with pytest.raises(
        ModelUnavailable, match="architecture 'mamba'; supported in GGUF files: gemma2"
    ):
        locate(str(tmp_path / "m.gguf"), weights=True)


@pytest.mark.parametrize("architecture", ["llama", "(later parts name none)"])
def test_part_of_a_split_gguf_is_rejected(architecture: str) -> None:
    metadata = {"split.count": 3, "split.no": 0, "general.architecture": architecture}
    with pytest.raises(UnsupportedGguf, match=r"m\.gguf is one part of a split GGUF file: merge"):
        config_of(GgufHeader(Path("m.gguf"), metadata, (), 0))


def test_mixture_of_experts_gguf_is_rejected(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_expert_count(8)
    _close(writer)
    with pytest.raises(UnsupportedGguf, match="mixture of experts"):
        write(tmp_path / "m.gguf", tmp_path)


def test_unsupported_gguf_tensor_type_is_rejected_by_name(path: Path) -> None:
    header = read_gguf_header(path)
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    for number, shown in ((Type.Q8_1, "Q8_1"), (Type.F64, "F64"), (999, "999")):
        struct.pack_into("<I", data, at, number)
        path.write_bytes(data)
        with pytest.raises(
            BadCheckpoint, match=f"attn_q.weight is of type {shown}; supported: F32"
        ):
            read_gguf_tensors(path)
    assert header.tensors


def test_truncated_gguf_file_is_rejected(path: Path) -> None:
    data = path.read_bytes()
    end_of_header = read_gguf_header(path).size
    rng = Random(1)
    places = [*range(32), *(rng.randrange(end_of_header) for _ in range(200))]
    for size in (*places, end_of_header - 33):
        path.write_bytes(data[:size])
        with pytest.raises(BadGguf):
            read_gguf_header(path)
    for size in (end_of_header, len(data) - 33):
        path.write_bytes(data[:size])
        with pytest.raises(BadCheckpoint, match="truncated"):
            read_gguf_tensors(path)


def _counts(tensors: int, keys: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, keys)


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HOSTILE = {
    "an empty file": b"",
    "another magic": b"GGML" + bytes(64),
    "version 1": struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
    "big-endian": struct.pack(">4sIQQ", b"GGUF", 3, 0, 0),
    "counts that overflow": _counts(2**63, 2**63),
    "as many keys as there can be": _counts(0, 2**64 - 1) + bytes(1000),
    "a string beyond the file": _counts(0, 1) + struct.pack("<Q", 2**63) + b"a",
    "a string that is not UTF-8": _counts(0, 1) + _key(b"\xff\xfe", 0, b"\0"),
    "an array of 2**60 bytes": _counts(0, 1) + _key(b"a", 9, struct.pack("<IQ", 0, 2**60)),
    "an array longer than the file": _counts(0, 1) + _key(b"a", 9, struct.pack("<IQ", 10, 1000)),
    "an array of arrays": _counts(0, 1) + _key(b"a", 9, struct.pack("<IQ", 9, 1)) + bytes(64),
    "an unknown type": _counts(0, 1) + _key(b"a", 77, bytes(8)),
    "a key twice": _counts(0, 2) + 2 * _key(b"a", 0, b"\0"),
    "an alignment of 0": _counts(0, 1) + _key(b"general.alignment", 4, struct.pack("<I", 0)),
    "an alignment that is no number": (
        _counts(0, 1) + _key(b"general.alignment", 8, struct.pack("<Q", 1) + b"8")
    ),
    "no dimension": _counts(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IIQ", 0, 0, 0),
    "2**32 dimensions": (
        _counts(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IIQ", 2**32 - 1, 0, 0)
    ),
    "a product beyond 64 bits": (
        _counts(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 2**33, 2**33, 0, 0)
    ),
    "a tensor twice": (
        _counts(2, 0) + 2 * (struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 1, 0, 0))
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_gguf_header_is_rejected(case: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(BadGguf, match=r"m\.gguf (is|has)"):
        read_gguf_header(path)


def test_corrupt_header_raises_only_bad_checkpoint(path: Path) -> None:
    data, rng = path.read_bytes(), Random(2)
    size = read_gguf_header(path).size
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(size)] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            read_gguf_tensors(path)
        except BadCheckpoint:
            pass


def test_overlapping_gguf_tensors_are_rejected(path: Path) -> None:
    _edit_offset(path, lambda offset: 0)
    with pytest.raises(BadCheckpoint, match="overlap"):
        read_gguf_tensors(path)
    _edit_offset(path, lambda offset: 2**63)
    with pytest.raises(BadCheckpoint, match="truncated"):
        read_gguf_tensors(path)


def test_factors_of_the_rope_beyond_the_gguf_file_are_rejected(tmp_path: Path) -> None:
    kind = MODELS["llama, factors of the rope, Q5_1"]
    path = write_gguf(tmp_path / "m.gguf", kind, random_model(kind))
    data, name = bytearray(path.read_bytes()), b"rope_freqs.weight"
    struct.pack_into("<Q", data, data.index(name) + len(name) + 4, 2**61)
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match="truncated: it ends before or within rope_freqs"):
        read_gguf_tensors(path)


def _edit_offset(path: Path, change: Callable[[int], int]) -> None:
    data, name = bytearray(path.read_bytes()), b"blk.1.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    (offset,) = struct.unpack_from("<Q", data, at)
    struct.pack_into("<Q", data, at, change(offset))
    path.write_bytes(data)


def test_gguf_file_without_tokenizer_is_rejected(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    _add_sizes(writer)
    writer.add_tensor("token_embd.weight", numpy.zeros((6, 512), numpy.float32))
    _add_layer(writer)
    _close(writer)
    with pytest.raises(
        ModelUnavailable, match=r"no usable tokenizer: tokenizer.ggml.model is None"
    ):
        locate(str(tmp_path / "m.gguf"), weights=True)


TOKENIZERS: dict[str, dict[str, object]] = {
    "model is 'rwkv'": {"model": "rwkv"},
    "tokens is not a list of tokens": {"tokens": [1, 2]},
    "merges is not a list of pairs": {"merges": ["a b", "ab"]},
    "scores is not a list of one": {"scores": [0.5]},
    "token_type is not a list of one": {"token_type": ["a", "b", "c"]},
    "merges is missing": {"merges": None},
    "scores is missing": {"model": "llama", "merges": None},
}


@pytest.mark.parametrize("cause", TOKENIZERS)
def test_unusable_tokenizer_is_refused_with_its_cause(cause: str) -> None:
    good: dict[str, object] = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    check_tokenizer(_header(good))
    check_tokenizer(_header(good | {"model": "llama", "merges": None, "scores": [0.0, 1.0, 2.0]}))
    with pytest.raises(BadGguf, match=rf"no usable tokenizer: tokenizer\.ggml\.{cause}"):
        check_tokenizer(_header(good | TOKENIZERS[cause]))


def _header(tokenizer: dict[str, object]) -> GgufHeader:
    metadata = {f"tokenizer.ggml.{k}": v for k, v in tokenizer.items() if v is not None}
    return GgufHeader(Path("m.gguf"), metadata, (), 0)


def test_missing_gguf_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="is not a file"):
        locate(str(tmp_path / "m.gguf"), weights=True)
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(GgufUnusable, match="is not a file"):
        directory_of(tmp_path / "m.gguf")


CONTRADICTIONS = {
    "block_count": (2**32 - 1, 2, 0),
    "embedding_length": (2**31 - 1, 63, 0),
    "feed_forward_length": (2**32 - 1, 97),
    "attention.head_count": (2**32 - 1, 5, 0),
    "attention.head_count_kv": (2**32 - 1, 1, 0),
    "attention.key_length": (2**32 - 1, 15, 0),
    "context_length": (0, 2**32 - 1),
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_sizes_that_contradict_the_tensors_are_refused(key: str, path: Path) -> None:
    data, name = bytearray(path.read_bytes()), f"llama.{key}".encode()
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
    for value in CONTRADICTIONS[key]:
        struct.pack_into("<I", data, at, value)
        path.write_bytes(data)
        with pytest.raises(BadCheckpoint, match=r"plain\.gguf: llama\."):
            read_gguf_tensors(path)


def test_end_token_beyond_the_vocabulary_is_refused(path: Path) -> None:
    data, name = bytearray(path.read_bytes()), b"tokenizer.ggml.eos_token_id"
    struct.pack_into("<I", data, data.index(name) + len(name) + 4, VOCAB)
    path.write_bytes(data)
    with pytest.raises(BadGguf, match="eos_token_id is"):
        write(path, path.parent)


def test_terminal_escapes_of_the_file_are_shown_escaped(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.GGUF", "a\x1b[31mb" + 5000 * "c")
    _close(writer)
    with pytest.raises(ModelUnavailable) as caught:
        locate(str(tmp_path / "m.GGUF"), weights=True)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 400
