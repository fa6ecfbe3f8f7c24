"""Start parameters of the fork server. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Budget:
    """CPU seconds that a compilation may take, and a mask."""

    compile_s: float
    mask_s: float


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of the fork server: its control socket and the memory of a grammar process."""

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
