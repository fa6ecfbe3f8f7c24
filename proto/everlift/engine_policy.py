"""Names of the engine's scheduling policies (see worker/engine/README.md). Pure."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

EnginePolicy: TypeAlias = Literal["continuous", "slai", "static", "magnus"]

#: Used instead of a policy's name to select the policy that each worker was started with.
DEFAULT: Final = "default"


def policy_named(text: str) -> EnginePolicy | None:
    """Return the policy with the name ``text``, or None if there is none."""
    policies: tuple[EnginePolicy, ...] = get_args(EnginePolicy)
    return next((policy for policy in policies if policy == text), None)
