"""Creation of a batching policy by its name. Pure."""

from __future__ import annotations

from everlift.engine_policy import EnginePolicy
from worker.engine.limits import Limits
from worker.engine.policies.continuous import Continuous
from worker.engine.policies.magnus import Magnus
from worker.engine.policies.policy import Policy
from worker.engine.policies.slai import Slai
from worker.engine.policies.static import Static


def policy_of(name: EnginePolicy, limits: Limits) -> Policy:
    match name:
        case "continuous":
            return Continuous(limits.scheduling)
        case "static":
            return Static(limits.max_num_seqs)
        case "slai":
            return Slai(limits.scheduling, limits.max_num_seqs)
        case "magnus":
            return Magnus(limits)
