"""Sampling on a GPU by a Triton kernel (worker.kernels.sampling).

The kernel does not sort, and the host does not wait for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.device.upload import Parcel
from worker.kernels.sampling import draw_rows
from worker.runner.sampling_metadata import SampleFn, SamplingMetadata

#: Number of tokens that one program reads at once, 16 per thread.
_BLOCK, _WARPS = 8192, 16


def sample_by_kernel(metadata: SamplingMetadata, parcel: Parcel) -> SampleFn:
    """Return the function that samples with the Triton kernel and the parameters ``metadata``.

    The kernel rounds sums differently from torch. If the uniform number is at the edge between two
    tokens, it may therefore select another one than torch does.
    """
    columns = (metadata.filters, metadata.keys.view(np.int64), metadata.positions)
    sent = [parcel.add(column) for column in columns]
    return lambda logits: _sample(logits, *(column() for column in sent))


def _sample(logits: Tensor, filters: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    draw_rows[(len(logits),)](
        tokens,
        logits,
        filters,
        keys,
        positions,
        logits.stride(0),
        VOCAB=logits.shape[1],
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return tokens
