"""Workloads by name. Pure.

A published trace consists of token counts and times. The files that a trace's authors published
determine a workload's rate, its burstiness, and the quantiles of its lengths:

    azure-*     Azure's LLM inference traces of 2023 (AzurePublicDataset): conversation and code
    mooncake    Mooncake's conversation trace (FAST'25), with hash ids of its blocks of 512 tokens
    chat        only the mean prompt and output lengths of ShareGPT's conversations, 161 and 338
                tokens (vLLM, SOSP'23)

Everything else is assumed:

    extreme lengths    chosen so that the means of the distributions equal those of the traces
    chat               the deviation of the lengths, the rate and the burstiness
    reasoning          everything
    all workloads      tenants, classes, targets, deadlines, and the ``max_tokens`` of clients
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.simulator.workloads.arrivals import Traffic
from cluster.simulator.workloads.lengths import LogNormal, Mixture, Normal, Quantiles
from cluster.simulator.workloads.workload import Workload

_AZURE_CONVERSATION = Workload(
    name="azure-conversation",
    application="conversation",
    prompt=Quantiles((0, 128), (0.5, 1020), (0.75, 1189), (0.9, 2734), (0.99, 4142), (1, 14_050)),
    # The trace has two kinds of outputs: short ones, and those near 400 tokens.
    output=Mixture(0.6, LogNormal(83, 0.45, most=1000), Normal(404, 29, most=1000)),
    max_tokens=1024,
    traffic=Traffic(5.53, cv=1.09, drift=0.22),
    ttft_target_s=1.0,
    deadline_s=120.0,
)
#: Gamma-distributed gaps with the trace's coefficient of variation reproduce the trace's index of
#: dispersion (see Traffic) over a minute, which is 164. Over a second the trace's index is 13, and
#: that of the Gamma-distributed gaps is five times as large.
_AZURE_CODE = Workload(
    name="azure-code",
    application="code",
    prompt=Quantiles((0, 214), (0.5, 1469), (0.75, 2744), (0.9, 5188), (0.99, 7436), (1, 7437)),
    output=Quantiles((0, 4), (0.5, 13), (0.75, 24), (0.9, 55), (0.99, 251), (1, 500)),
    max_tokens=512,
    traffic=Traffic(2.57, cv=13.2, drift=0.2),
    ttft_target_s=0.5,
    deadline_s=30.0,
)
_MOONCAKE = Workload(
    name="mooncake",
    application="conversation",
    prompt=Quantiles(
        (0, 31), (0.5, 6909), (0.75, 15_367), (0.9, 27_367), (0.99, 85_400), (1, 126_000)
    ),
    output=Quantiles((0, 40), (0.5, 350), (0.75, 472), (0.9, 597), (0.99, 1119), (1, 2000)),
    max_tokens=2048,
    traffic=Traffic(3.40, cv=3.0, drift=0.2),
    # 36.6 % of the trace's blocks of 512 tokens repeat earlier blocks.
    continued=0.37,
    ttft_target_s=10.0,
    deadline_s=300.0,
)
_CHAT = Workload(
    name="chat",
    application="chat",
    prompt=LogNormal(88, 1.1, most=4096),
    output=LogNormal(225, 0.9, most=2048),
    max_tokens=2048,
    traffic=Traffic(10.0),
    ttft_target_s=1.0,
    deadline_s=120.0,
)
_REASONING = Workload(
    name="reasoning",
    application="reasoning",
    prompt=LogNormal(120, 1.21, most=16_384),
    output=LogNormal(1500, 1.18, most=16_384),
    max_tokens=16_384,
    traffic=Traffic(1.0),
    ttft_target_s=2.0,
    deadline_s=900.0,
)

WORKLOADS: Mapping[str, Workload] = {
    each.name: each for each in (_AZURE_CONVERSATION, _AZURE_CODE, _MOONCAKE, _CHAT, _REASONING)
}
