"""Rows to be sampled, and ways to filter them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everlift.sampling import SamplingParams
from worker.runner.sampling_backend import SamplingTable
from worker.runner.sampling_metadata import SamplingMetadata

GREEDY = SamplingParams(temperature=0.0)
#: Vocabulary larger than the first candidates, so that some filters need the whole row.
WIDE = 1200
FILTERS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.9, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.1, top_k=12, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=100.0, top_p=0.9),
    SamplingParams(temperature=50.0, top_k=700, top_p=0.97),
    SamplingParams(temperature=2.0, top_k=1 << 20, top_p=0.5),
]


class Row(NamedTuple):
    params: SamplingParams
    position: int = 0
    choice: int = 0


def metadata(rows: Sequence[Row]) -> SamplingMetadata:
    table = SamplingTable()
    for slot, row in enumerate(rows):
        table.write(slot, row.params, row.choice)
    return table.metadata(np.arange(len(rows)), np.array([row.position for row in rows]))


def logits(rows: int, vocab: int, seed: int = 3) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2
