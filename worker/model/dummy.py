"""Pseudo-random parameters, for trying a model's shape and speed without its weights.

A tensor's name seeds a stream of PERIOD values, and element i of the tensor is element i mod PERIOD
of the stream. The model is therefore the same for any number of ranks, and filling a slice costs no
more than copying it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from everlift.progress import Progress, ignore_progress
from worker.model.decoder import Decoder
from worker.model.filling import Filler
from worker.model.piece import Piece
from worker.model.sharing import Run
from worker.model.weight_format import EXPONENTS_NAME, SCALE_NAMES

#: A prime, so that the rows of a table begin at different positions of the stream.
PERIOD = 262_147
#: Standard deviation of biases, whose mean is 0, and of norm weights, whose mean is 1.
_SMALL = 0.02
#: Mean of the scales of quantised weights.
_SCALE = 2**-10


def fill(decoder: Decoder, progress: Progress = ignore_progress) -> int:
    """Fill all parameters of ``decoder`` with pseudo-random values; return their size in bytes.

    ``progress`` is called with the number of bytes filled so far and their total.
    """
    pieces = list(decoder.pieces())
    filler = Filler(pieces, progress)
    for piece in pieces:
        # Convert the short stream once: converting each element would take longer than copying it.
        stream = _codes(piece) if piece.writer else _stream(piece).to(piece.into.dtype)
        filler.fill(piece, stream.dtype, partial(_read, stream))
    return filler.total_bytes


def _stream(piece: Piece) -> Tensor:
    """Return the PERIOD uniformly distributed values of a tensor.

    The values of a matrix have the variance 1 / (number of input features), so that a product has
    about the magnitude of its input.
    """
    if piece.name.endswith(SCALE_NAMES):
        return _uniform(piece.name, _SCALE, _SCALE / 10)
    if piece.name.endswith("bias"):
        return _uniform(piece.name, 0.0, _SMALL)
    if len(piece.shape) == 1:
        return _uniform(piece.name, 1.0, _SMALL)
    # Stacked experts have their inputs in the dimension before the last.
    inputs = piece.shape[-1] if len(piece.shape) == 2 else piece.shape[-2]
    return _uniform(piece.name, 0.0, inputs**-0.5)


def _codes(piece: Piece) -> Tensor:
    """Return PERIOD elements of a quantised layer's tensor, in the type in which it is stored.

    The elements are random codes, or words of several random codes; no code of e4m3 is NaN.
    Exponents of scales are all the same.
    """
    assert piece.writer is not None
    if piece.name.endswith(EXPONENTS_NAME):
        return torch.full((PERIOD,), round(math.log2(_SCALE)) + 127, dtype=torch.uint8)
    size = PERIOD * piece.writer.dtype.itemsize
    # No code is the NaN of an 8-bit float without this bit.
    bytes_ = _generator(piece.name).integers(0, 256, size, np.uint8) & 0xBF
    return torch.from_numpy(bytes_).view(piece.writer.dtype)


def _uniform(name: str, mean: float, deviation: float) -> Tensor:
    values = _generator(name).random(PERIOD, dtype=np.float32)
    return torch.from_numpy(values).sub_(0.5).mul_(math.sqrt(12) * deviation).add_(mean)


def _generator(name: str) -> np.random.Generator:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16])
    return np.random.Generator(np.random.Philox(key=seed))


def _read(stream: Tensor, runs: Iterable[Run], into: Tensor) -> None:
    for run in runs:
        _copy(stream, run.start % PERIOD, into[: run.length])
        into = into[run.length :]


def _copy(stream: Tensor, place: int, into: Tensor) -> None:
    while len(into):
        part = stream[place : place + len(into)]
        into[: len(part)] = part
        into, place = into[len(part) :], 0
