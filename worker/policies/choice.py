"""The policies by their names. Pure."""

from __future__ import annotations

from everlift.engine_policy import EnginePolicy
from worker.limits import Limits
from worker.policies.continuous import Continuous
from worker.policies.magnus import Magnus
from worker.policies.policy import Policy
from worker.policies.slai import Slai
from worker.policies.static import Static


def policy_of(name: EnginePolicy, limits: Limits) -> Policy:
    match name:
        case "continuous":
            return Continuous()
        case "static":
            return Static(limits.max_num_seqs)
        case "slai":
            return Slai(limits.scheduling, limits.max_num_seqs)
        case "magnus":
            return Magnus(limits)
