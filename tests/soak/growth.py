"""Growth of a process's resident memory per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

#: Limit of the growth per request after warm-up.
LIMIT_KIB = 0.2
#: Noise of the peak of resident memory: glibc returns free memory to the kernel in steps of some
#: MiB, and the first product with another number of rows takes 2 MiB once. The limit exceeds the
#: noise after `NOISE_KIB / LIMIT_KIB`, which is 20,480 requests.
NOISE_KIB = 4096
#: Number of parts of the samples, of which the first and the last one are compared.
_PARTS = 5


class Sample(NamedTuple):
    """Resident memory of a process after a number of requests."""

    requests: int
    kib: int


@dataclass(frozen=True)
class Growth:
    """Growth after warm-up, which is the first half of the requests.

    ``requests`` is the number of requests over which the growth was measured. ``warm_up_mib`` is
    the growth from the first sample to the first peak after warm-up.
    """

    requests: int
    kib_per_request: float
    warm_up_mib: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Growth:
        """Compare the peaks of the first and the last fifth of the samples after warm-up.

        Peaks do not depend on when memory was returned to the kernel.
        """
        later = [sample for sample in samples if 2 * sample.requests >= samples[-1].requests]
        size = len(later) // _PARTS
        assert size > 1, f"{len(samples)} samples are too few"
        first, last = later[:size], later[-size:]
        requests = last[0].requests - first[0].requests
        peak, last_peak = (max(sample.kib for sample in part) for part in (first, last))
        return cls(requests, (last_peak - peak) / requests, (peak - samples[0].kib) / 1024)

    @property
    def bound_kib(self) -> float:
        """Smallest bound of the growth per request that noise permits, at least the limit."""
        return max(LIMIT_KIB, NOISE_KIB / self.requests)

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "requests_measured": self.requests,
            "kib_per_request": round(self.kib_per_request, 3),
            "bound_kib_per_request": round(self.bound_kib, 3),
            "warm_up_mib": round(self.warm_up_mib, 1),
        }


def resident_kib(pid: int) -> int:
    """Return the resident memory of a process in KiB (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
