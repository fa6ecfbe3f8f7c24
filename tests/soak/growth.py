"""Growth of a process's resident memory per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, NamedTuple

#: Limit of the growth per request after warm-up.
LIMIT_KIB = 0.2
#: Noise of resident memory: glibc returns free memory to the kernel in steps of up to some MiB, and
#: the first product with another number of rows takes 2 MiB once. A growth below the limit can be
#: told from it after `NOISE_KIB / LIMIT_KIB`, which is 20,480 requests.
NOISE_KIB = 4096
_BLOCKS = 10


class Sample(NamedTuple):
    """Resident memory of a process after a number of requests."""

    requests: int
    kib: int


@dataclass(frozen=True)
class Growth:
    """Growth after warm-up, which is the first half of the requests.

    ``requests`` is the number of requests after warm-up. ``warm_up_mib`` is the growth from the
    first sample to the end of warm-up.
    """

    requests: int
    kib_per_request: float
    warm_up_mib: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Growth:
        """Return the slope of a line through the medians of blocks of samples, so that single
        outliers do not count. Needs two samples a block after warm-up."""
        later = [sample for sample in samples if 2 * sample.requests >= samples[-1].requests]
        blocks = [
            later[len(later) * block // _BLOCKS : len(later) * (block + 1) // _BLOCKS]
            for block in range(_BLOCKS)
        ]
        assert all(len(block) > 1 for block in blocks), f"{len(samples)} samples are too few"
        medians = [Sample(*map(median, zip(*block, strict=True))) for block in blocks]
        slope, _ = linear_regression(*zip(*medians, strict=True))
        requests = later[-1].requests - later[0].requests
        return cls(requests, slope, (medians[0].kib - samples[0].kib) / 1024)

    @property
    def bound_kib(self) -> float:
        """The smallest bound of the growth per request that noise permits, at least the limit."""
        return max(LIMIT_KIB, NOISE_KIB / self.requests)

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "requests_after_warm_up": self.requests,
            "kib_per_request": round(self.kib_per_request, 3),
            "bound_kib_per_request": round(self.bound_kib, 3),
            "warm_up_mib": round(self.warm_up_mib, 1),
        }


def resident_kib(pid: int) -> int:
    """Return the resident memory of a process in KiB (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
