"""Loading of safetensors and GGUF files into a rank's parameters: each needed slice once.

Only the rank's slices of a tensor are read, each once, together with small gaps between them. If a
model ties its head to the embedding and its files have both tables, the two tables are first read
and compared, up to the first difference. The headers of all files are checked before the first
tensor is filled. Several threads fill tensors, in the order of the files, because a single thread
would mostly wait for storage or for the copy to the device. Files are read instead of mapped into
memory, because the kernel counts all pages read from a mapped file as memory of the process until
the file is closed.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from everlift import logs
from everlift.gguf_header import SUFFIX
from everlift.model_files import weight_files
from everlift.progress import Progress, ignore_progress
from worker.model.checkpoint import BadCheckpoint, StoredTensor, read_tensors, some
from worker.model.decoder import Decoder
from worker.model.filling import Filler, Read, read_exactly
from worker.model.gguf_weights import GgufStoredTensor, gguf_reading, read_gguf_tensors
from worker.model.huggingface.config import HfConfig
from worker.model.piece import Piece
from worker.model.sharing import Run
from worker.model.spec import ModelSpec
from worker.model.weight_format import EXPONENTS_NAME, SCALE_NAMES, WeightFormat

log = logs.get_logger(__name__)

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
#: The same types by their names in config.json.
_CONFIG_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
#: Types of codes of quantised weights.
_CODES = ("I32", "I8", "F8_E4M3")
#: Tensors that a checkpoint may have beside the parameters: tables that the decoder computes
#: itself.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")
#: Number of elements of two tensors that are compared at a time.
_COMPARED_ELEMENTS = 1 << 20

#: Pieces by the name of their tensor.
_PiecesByName = dict[str, list[Piece]]


class _Part(NamedTuple):
    tensor: StoredTensor
    piece: Piece


def load(
    decoder: Decoder,
    directory: str | Path,
    progress: Progress = ignore_progress,
    num_readers: int = 1,
) -> int:
    """Fill every parameter of ``decoder`` from a checkpoint, and return their size in bytes.

    ``num_readers`` threads read the files. ``progress`` is called with the number of bytes filled
    so far and their total. Raises BadCheckpoint if the files are malformed or do not match the
    decoder.
    """
    tensors = _tensors(Path(directory))
    redundant = _untie_if_stored_apart(decoder, {tensor.name: tensor for tensor in tensors})
    pieces = list(decoder.pieces())
    expected = _by_name(pieces)
    tensors = [it for it in tensors if not it.name.startswith(decoder.unread)]
    if decoder.weight_format is not None:
        tensors = _without_unread(decoder.weight_format, tensors, expected)
    names = [tensor.name for tensor in tensors if tensor.name != redundant]
    _check_names(directory, expected, names)
    _check_forms(expected, tensors)
    filler = Filler(pieces, progress)
    parts = [_Part(tensor, piece) for tensor in tensors for piece in expected.get(tensor.name, ())]
    _fill(parts, filler, num_readers)
    if decoder.weight_format is not None:
        _check_scales(pieces)
    return filler.total_bytes


def stored_dtype(directory: str | Path, reads_weights: bool = True) -> torch.dtype | None:
    """Return the type of a checkpoint's matrices; None if they have several or an unsupported one.

    Quantised matrices are left out, except those of a GGUF file, which are read as float32 and
    count as float32. The files of the weights are not read if ``reads_weights`` is false. The
    result is then the type that config.json names, or None if it names none or an unsupported one.
    Raises BadCheckpoint for malformed files, and UnsupportedModel for a malformed config.json.
    """
    if not reads_weights:
        config = HfConfig.read(Path(directory) / "config.json")
        return _CONFIG_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
    dtypes = {
        tensor.dtype
        for tensor in _tensors(Path(directory))
        if len(tensor.shape) > 1 and tensor.name.endswith("weight") and tensor.dtype not in _CODES
    }
    return _DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None


def with_stored_scales(
    spec: ModelSpec, directory: str | Path, reads_weights: bool = True
) -> ModelSpec:
    """Return ``spec`` with the name and the type of the scales in a quantised checkpoint's files.

    If ``reads_weights`` is false, or the checkpoint is not quantised, the result is ``spec``.
    Raises BadCheckpoint for malformed files.
    """
    if spec.weight_format is None or not reads_weights:
        return spec
    scales = [tensor for tensor in _tensors(Path(directory)) if tensor.name.endswith(SCALE_NAMES)]
    if not scales:
        return spec
    names = {tensor.name.rpartition(".")[2] for tensor in scales}
    if len(names) > 1:
        raise BadCheckpoint(f"{directory} names its scales in several ways: {some(names)}")
    types = {tensor.dtype for tensor in scales}
    scale_type = types.pop() if len(types) == 1 and types <= _DTYPES.keys() else "F32"
    format = replace(spec.weight_format, scales=names.pop(), scale_type=scale_type)
    return replace(spec, weight_format=format)


def _without_unread(
    format: WeightFormat, tensors: Sequence[StoredTensor], expected: _PiecesByName
) -> list[StoredTensor]:
    """Return the tensors of a quantised checkpoint without those that the products do not need.

    Raises BadCheckpoint if an omitted ``g_idx`` does not divide the inputs into consecutive groups,
    if an omitted bias is not zero, or if either has an unsupported type.
    """
    needed = []
    for tensor in tensors:
        if tensor.name in expected or not format.ignores(tensor.name):
            needed.append(tensor)
        elif tensor.name.endswith("g_idx"):
            _check_order(format, tensor)
        elif tensor.name.endswith(".bias"):
            _check_zero(tensor)
    return needed


def _check_order(format: WeightFormat, tensor: StoredTensor) -> None:
    """Raise BadCheckpoint unless ``tensor`` assigns consecutive inputs to each group.

    The tensor must have type I32 and hold the group of each input i: i // ``format.group``, or 0 if
    all inputs form one group.
    """
    if tensor.dtype != "I32":
        raise BadCheckpoint(f"{tensor.name} is {tensor.dtype}; supported: I32")
    groups = _whole(tensor, torch.int32).flatten()
    length = format.group or max(len(groups), 1)
    if not torch.equal(groups, torch.arange(len(groups), dtype=torch.int32) // length):
        raise BadCheckpoint(
            f"{tensor.name} orders the inputs by activation (desc_act, actorder group), which is "
            "not supported: use a checkpoint that is quantised without it"
        )


def _check_scales(pieces: Iterable[Piece]) -> None:
    """Raise BadCheckpoint if a scale of quantised weights is infinite or NaN."""
    for piece in pieces:
        is_scale = piece.name.endswith((*SCALE_NAMES, EXPONENTS_NAME))
        if is_scale and not piece.into.isfinite().all():
            raise BadCheckpoint(f"{piece.name} has scales that are infinite or NaN")


def _check_zero(tensor: StoredTensor) -> None:
    if tensor.dtype not in _DTYPES or _whole(tensor, _DTYPES[tensor.dtype]).any():
        raise BadCheckpoint(f"{tensor.name} is not zero, but the model has no such bias")


def _whole(tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(tensor.shape, dtype=dtype)
    with tensor.path.open("rb", buffering=0) as file:
        _reading(file.fileno(), tensor)([Run(0, whole.numel())], whole.flatten())
    return whole


def _untie_if_stored_apart(decoder: Decoder, stored: Mapping[str, StoredTensor]) -> str | None:
    """Untie the decoder's head if the checkpoint stores a head that differs from the embedding.

    Return the name of a stored head that equals the embedding and need not be read, else None. The
    config of a fine-tuned model may tie head and embedding although they differ; transformers then
    unties them too. Each rank compares the complete tables, so all decide alike without
    communication.
    """
    if decoder.tied is None or not stored.keys() >= {*decoder.tied}:
        return None
    embedding, head = (stored[name] for name in decoder.tied)
    dtype = decoder.layer_by_layer.embedding.weight.plain.dtype
    if _are_equal(embedding, head, dtype):
        return head.name
    log.warning("output head not tied: the checkpoint has a separate one", head=head.name)
    decoder.untie()
    return None


def _are_equal(one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    both, size = (one, other), math.prod(one.shape)
    if one.shape != other.shape or not all(tensor.dtype in _DTYPES for tensor in both):
        return False
    with ExitStack() as stack:
        files = [stack.enter_context(tensor.path.open("rb", buffering=0)) for tensor in both]
        reads = [_reading(file.fileno(), t) for file, t in zip(files, both, strict=True)]
        buffers = [torch.empty(_COMPARED_ELEMENTS, dtype=_DTYPES[t.dtype]) for t in both]
        for start in range(0, size, _COMPARED_ELEMENTS):
            run = Run(start, min(_COMPARED_ELEMENTS, size - start))
            for read, buffer in zip(reads, buffers, strict=True):
                read([run], buffer[: run.length])
            if not torch.equal(*(buffer[: run.length].to(dtype) for buffer in buffers)):
                return False
    return True


def _by_name(pieces: Iterable[Piece]) -> _PiecesByName:
    pieces_by_name: _PiecesByName = defaultdict(list)
    for piece in pieces:
        pieces_by_name[piece.name].append(piece)
    for several in pieces_by_name.values():
        several.sort(key=lambda piece: [bound.start for bound in piece.bounds])
    return dict(pieces_by_name)


def _tensors(directory: Path) -> list[StoredTensor]:
    try:
        files = weight_files(directory)
    except ValueError as error:
        raise BadCheckpoint(str(error)) from None
    tensors: list[StoredTensor] = []
    for path in files:
        tensors += read_gguf_tensors(path) if path.suffix == SUFFIX else read_tensors(path)
    return tensors


def _check_names(directory: str | Path, expected: _PiecesByName, found: Sequence[str]) -> None:
    missing = expected.keys() - set(found)
    if missing:
        raise BadCheckpoint(f"{directory} lacks {some(missing)}")
    unexpected = [n for n in found if n not in expected and not _DERIVED.search(n)]
    if unexpected:
        raise BadCheckpoint(f"{directory} has tensors that the model does not: {some(unexpected)}")
    repeated = [name for name, count in Counter(found).items() if count > 1]
    if repeated:
        raise BadCheckpoint(f"{directory} has tensors in more than one file: {some(repeated)}")


def _check_forms(expected: _PiecesByName, tensors: Iterable[StoredTensor]) -> None:
    for tensor in tensors:
        for piece in expected.get(tensor.name, ()):
            if _without_ones(tensor.shape) != _without_ones(piece.shape):
                raise BadCheckpoint(
                    f"{piece.name} has shape {tensor.shape}; "
                    f"the configuration requires {piece.shape}"
                )
            supported = _DTYPES if piece.writer is None else piece.writer.stored
            if tensor.dtype not in supported:
                raise BadCheckpoint(
                    f"{piece.name} is {tensor.dtype}; supported: {', '.join(supported)}"
                )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _fill(parts: Iterable[_Part], filler: Filler, num_readers: int) -> None:
    def fill(part: _Part) -> None:
        with part.tensor.path.open("rb", buffering=0) as file:
            writer = part.piece.writer
            dtype = _DTYPES[part.tensor.dtype] if writer is None else writer.dtype
            filler.fill(part.piece, dtype, _reading(file.fileno(), part.tensor))

    with ThreadPoolExecutor(num_readers, "weights") as readers:
        try:
            for _ in readers.map(fill, parts):
                pass
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise


def _reading(descriptor: int, tensor: StoredTensor) -> Read:
    if isinstance(tensor, GgufStoredTensor):
        return gguf_reading(descriptor, tensor)

    def read(runs: Iterable[Run], into: Tensor) -> None:
        size, buffer, end = into.itemsize, into.view(torch.uint8).numpy().data, 0
        for run in runs:
            begin, end = end, end + run.length * size
            if not read_exactly(descriptor, buffer[begin:end], tensor.start + run.start * size):
                raise BadCheckpoint(f"{tensor.path} became shorter while it was read")

    return read
