"""Argmax of each row of logits: in torch, or compiled for CPUs (argmax.cpp)."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from worker.native import native

_SOURCE = Path(__file__).with_name("argmax.cpp")
#: Token of a row with a logit that is NaN or +inf.
NOT_FINITE = -1
#: Token of a row whose logits are all -inf.
NOTHING_LEFT = -2
#: With fewer logits, one thread finishes before a second one would have started.
_MIN_PARALLEL_SIZE = 1 << 17


class Argmax(Protocol):
    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row of ``logits`` fp32 [n, vocab], and its token.

        The results are fp32 [n] and int64 [n]. If several logits are the largest, the first token
        is returned. The token is NOT_FINITE if a logit is NaN or +inf, and NOTHING_LEFT if all are
        -inf.
        """
        ...


def argmax_by_torch(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, tokens = logits.max(dim=-1)
    tokens = tokens.where(values.isfinite(), NOT_FINITE)
    return values, tokens.masked_fill_(values == -math.inf, NOTHING_LEFT)


class CompiledArgmax:
    """Argmax by compiled code on a CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._find = library.largest_of_rows
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._find.argtypes = (pointer, size, pointer, pointer, size, size, ctypes.c_int)
        self._find.restype = None

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        assert logits.dtype == torch.float32 and logits.stride(1) == 1
        rows, width = logits.shape
        values, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        threads = 1 if logits.numel() < _MIN_PARALLEL_SIZE else torch.get_num_threads()
        self._find(
            logits.data_ptr(),
            logits.stride(0),
            values.data_ptr(),
            tokens.data_ptr(),
            rows,
            width,
            threads,
        )
        return values, tokens


def choose_argmax(device: torch.device) -> Argmax:
    """Return the compiled argmax if ``device`` is a CPU and the code is available, else torch's.

    Raises OSError or ValueError as ``native.compiled`` does.
    """
    return (_compiled() if device.type == "cpu" else None) or argmax_by_torch


@cache
def _compiled() -> CompiledArgmax | None:
    library = native.compiled(_SOURCE)
    return None if library is None else CompiledArgmax(library)
