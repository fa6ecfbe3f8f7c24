"""Attention of prompts on a GPU by third-party kernels, if these are installed.

A PromptBackend computes the attention of a span of a step's rows. The span begins with the first
row that has many new tokens, and ends with the last such row. Rows inside the span may have few.

PromptKernels uses the backend only for the attention forms for which it gave correct results in a
trial, and no longer uses it after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cache as cache_of
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everlift import logs
from worker.attention.backend import AttentionForm
from worker.attention.tiles import FEW
from worker.device.upload import Parcel
from worker.engine.plan import Ints, Rows

log = logs.get_logger(__name__)


def span_of_prompts(counts: Ints) -> slice | None:
    """Return the span from the first to the last row with more than FEW new tokens.

    ``counts`` [n] are the numbers of new tokens of all rows. Returns None if no row has that many.
    """
    (many,) = (counts > FEW).nonzero()
    return slice(int(many[0]), int(many[-1]) + 1) if len(many) else None


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Consecutive rows of a step; their number is n.

    The sequence of row i has ``lengths[i]`` positions, of which the last ``counts[i]`` are new
    tokens. ``tables`` [n, width] has the blocks of all positions of each row. Entries after a row's
    last block are undefined. ``tensors`` are the same data on the device.
    """

    counts: Ints
    lengths: Ints
    tables: NDArray[np.int32]
    tensors: PromptTensors


@dataclass(frozen=True, slots=True, eq=False)
class PromptTensors:
    """Data of Prompts on the device, as int32 tensors.

    ``bounds`` is [n + 1]: among the new tokens of all n rows, those of row i have the indices from
    ``bounds[i]`` to before ``bounds[i + 1]``.
    """

    bounds: Tensor
    lengths: Tensor
    tables: Tensor


def bounds_of(counts: Ints) -> NDArray[np.int32]:
    """Return the bounds [n + 1] of n consecutive groups, of which group i has ``counts[i]`` items.

    Bound i is the index of the first item of group i; the last bound is the number of all items.
    """
    return np.concatenate(([0], counts.cumsum())).astype(np.int32)


class PromptStep(Protocol):
    def attend(self, layer: Tensor, query: Tensor, form: AttentionForm) -> Tensor:
        """Return the attention of the prompts' ``query`` [tokens, heads, head_dim].

        ``layer`` [blocks, 2, kv_heads, BLOCK_SIZE, head_dim] is the cache of one layer. The
        returned tensor has the shape of ``query``.
        """
        ...


class PromptBackend(Protocol):
    @property
    def name(self) -> str: ...

    def prepare(self, prompts: Prompts) -> PromptStep: ...


class Feature(NamedTuple):
    """Presence of a window and of a softcap in an AttentionForm; a kernel may not support them."""

    window: bool
    softcap: bool

    @classmethod
    def of(cls, form: AttentionForm) -> Feature:
        return cls(form.window is not None, form.softcap is not None)


class PromptKernels:
    """Third-party attention ``backend`` for prompts, which is used until it fails.

    ``features`` are the combinations of window and softcap for which a trial run of the backend
    gave correct results.
    """

    def __init__(self, backend: PromptBackend, features: Set[Feature]) -> None:
        self._backend = backend
        self._features = features
        self._works = True

    @property
    def name(self) -> str:
        return self._backend.name

    def supports(self, form: AttentionForm) -> bool:
        return self._works and form.sinks is None and Feature.of(form) in self._features

    def of_step(
        self, rows: Rows, span: slice, tables: Callable[[], Tensor], parcel: Parcel
    ) -> PromptAttention:
        """Return an object that computes the attention of the rows in ``span``.

        ``tables`` returns these rows' block tables [n, width] on the device. Other data for the
        device is added to ``parcel``.
        """
        counts = rows.counts[span]
        lengths = rows.starts[span] + counts
        device_bounds = parcel.add(bounds_of(counts))
        device_lengths = parcel.add(lengths.astype(np.int32))

        def prepare() -> PromptStep:
            tensors = PromptTensors(device_bounds(), device_lengths(), tables())
            blocks = rows.tables[rows.slots[span], : tensors.tables.shape[1]]
            return self._backend.prepare(Prompts(counts, lengths, blocks, tensors))

        first = int(rows.firsts[span.start])
        return PromptAttention(self, slice(first, first + int(counts.sum())), prepare)

    def disable(self, error: Exception) -> None:
        self._works = False
        log.warning("attention library failed; disabled", library=self.name, cause=repr(error))


class PromptAttention:
    """Attention of one step's prompts; ``tokens`` is the slice of their tokens in the step."""

    def __init__(
        self, kernels: PromptKernels, tokens: slice, prepare: Callable[[], PromptStep]
    ) -> None:
        self.tokens = tokens
        self._kernels = kernels
        self._prepare = cache_of(prepare)

    def attend(self, layer: Tensor, query: Tensor, form: AttentionForm) -> Tensor | None:
        """Return the attention of the prompts' tokens, or None if another kernel must compute it.

        The result has one entry for each token in the slice ``tokens``. ``query`` [tokens, heads,
        head_dim] has all tokens of the step. ``layer`` [blocks, 2, kv_heads, BLOCK_SIZE, head_dim]
        is the cache of one layer. If the third-party kernels fail, the error is logged, None is
        returned, and they are not used again. Only torch.OutOfMemoryError is raised to the caller.
        """
        if not self._kernels.supports(form):
            return None
        try:
            return self._prepare().attend(layer, query[self.tokens], form)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._kernels.disable(error)
            return None
