"""Start parameters of the fork server. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum CPU time, in seconds, of a compilation and of the computation of a mask."""

    compile_s: float
    mask_s: float


@dataclass(frozen=True, slots=True)
class Launch:
    """Start parameters of the fork server, which are passed as JSON.

    ``control`` is the file descriptor of its control socket, and ``process_mib`` the memory limit
    of a grammar process.
    """

    control: int
    model: str
    revision: str
    vocab_size: int
    budget: Budget
    process_mib: int

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**fields | {"budget": Budget(**fields["budget"])})
