"""What somebody may ask of a request's past, and the answer, here by a made-up simulator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from everlift.errors import (
    InvalidRequest,
    LedgerUnavailable,
    OutOfRange,
    QueueFull,
    UnknownRequest,
    Unsupported,
)
from everlift.transport import GRPC
from everlift.v1 import admin_pb2
from everlift.v1 import inference_pb2 as pb
from router.config import RouterConfig
from router.gateway.caller import ANYONE, Caller, Scope
from router.gateway.counterfactuals import NO_COUNTERFACTUALS, Counterfactuals
from router.gateway.inference import Inference
from router.gateway.what_if import NoEstimate
from router.ledger.memory import MemoryLedger
from router.metrics.catalogue import WHAT_IF_ANSWERS
from router.rulebook import Rulebook
from tests.gateway_support import Gateway, gateway_ledger
from tests.ledgers import Clock
from tests.made_up_simulator import MadeUpSimulator

CONFIG = RouterConfig(model="fake", patience=4.0)
KINDS = [admin_pb2.WorkerKind(device="h100", workers=2)]
FINISHED = pb.Explanation(
    state=pb.REQUEST_STATE_FINISHED,
    total_s=2.0,
    attempts=[pb.ExplainedAttempt(queue=pb.QueueStay(order="hrrn")), pb.ExplainedAttempt()],
)


def asking(
    simulator: MadeUpSimulator, timeout_s: float = 20.0, answers: list[str] | None = None
) -> Counterfactuals:
    """``answers`` get what came of each simulation."""

    def observe(answer: str, seconds: float) -> None:
        assert answer in WHAT_IF_ANSWERS and 0 <= seconds < 60
        heard.append(answer)

    heard = [] if answers is None else answers
    rulebook = Rulebook(CONFIG, MemoryLedger(Clock()), [])
    return Counterfactuals(simulator, rulebook, lambda: KINDS, timeout_s, observe)


async def ask(
    counterfactuals: Counterfactuals,
    *policies: str,
    of: pb.Explanation = FINISHED,
    request_id: str = "r",
) -> Sequence[pb.Counterfactual]:
    return await counterfactuals.of(request_id, of, counterfactuals.supposed(policies))


async def test_the_policy_that_it_ran_under_is_simulated_too() -> None:
    simulator = MadeUpSimulator()
    told = await ask(asking(simulator), "shortest patience=3", "deadline")
    [question] = simulator.asked
    assert {name: (it.order, it.patience) for name, it in question.policies.items()} == {
        "hrrn": ("hrrn", 4.0),
        "shortest patience=3": ("shortest", 3.0),
        "deadline": ("deadline", 4.0),
    }
    assert (question.request_id, question.kinds) == ("r", KINDS)
    assert [(it.policy, it.actual, it.cause) for it in told] == [
        ("hrrn", True, ""),
        ("shortest patience=3", False, ""),
        ("deadline", False, "by estimate it would not have come to its end"),
    ]
    assert [it.seconds for it in told if it.HasField("seconds")] == [1.5, 1.5]
    assert {(it.error, it.requests) for it in told} == {(0.183, 1234)}


async def test_where_nobody_told_the_order_that_of_now_stands_for_it() -> None:
    untold = pb.Explanation(state=pb.REQUEST_STATE_FINISHED)
    told = await ask(asking(MadeUpSimulator()), "hrrn", of=untold)
    assert [(it.policy, it.actual) for it in told] == [("fifo", True), ("hrrn", False)]


async def test_who_asks_nothing_costs_nothing() -> None:
    simulator = MadeUpSimulator()
    assert await ask(asking(simulator)) == []
    assert not simulator.asked


async def test_what_goes_on_has_a_cause_in_the_place_of_an_estimate() -> None:
    simulator = MadeUpSimulator()
    running = pb.Explanation(state=pb.REQUEST_STATE_RUNNING)
    [told] = await ask(asking(simulator), "hrrn", of=running)
    assert told == pb.Counterfactual(
        policy="hrrn", cause="it is running: only what finished can be simulated"
    )
    assert not simulator.asked


async def test_so_has_what_cannot_be_simulated() -> None:
    simulator = MadeUpSimulator(NoEstimate("no worker is connected"))
    told = await ask(asking(simulator), "fifo", "hrrn")
    assert [(it.policy, it.cause) for it in told] == [
        ("fifo", "no worker is connected"),
        ("hrrn", "no worker is connected"),
    ]


async def test_so_has_what_takes_too_long_and_no_work_is_left() -> None:
    simulator = MadeUpSimulator()
    simulator.may_answer.clear()
    [told] = await ask(asking(simulator, timeout_s=0.01), "hrrn")
    assert told.cause == "to simulate it takes more than 0.01 s (router.what_if_timeout)"
    assert simulator.running == 0


async def test_what_came_of_each_simulation_is_heard_and_of_those_that_never_began_nothing() -> (
    None
):
    answers: list[str] = []
    await ask(asking(MadeUpSimulator(), answers=answers), "hrrn")
    await ask(asking(MadeUpSimulator(NoEstimate("no worker")), answers=answers), "hrrn")
    with pytest.raises(LedgerUnavailable):
        await ask(asking(MadeUpSimulator(LedgerUnavailable("away")), answers=answers), "hrrn")
    slow = MadeUpSimulator()
    slow.may_answer.clear()
    await ask(asking(slow, timeout_s=0.01, answers=answers), "hrrn")
    counterfactuals = asking(slow, answers=answers)
    runs, waits = (asyncio.create_task(ask(counterfactuals, "hrrn")) for _ in range(2))
    await asyncio.sleep(0)
    for task in (waits, runs):
        task.cancel()
    await asyncio.gather(runs, waits, return_exceptions=True)
    assert answers == ["estimate", "no_estimate", "error", "no_estimate", "cancelled"]


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        ("", "order: must be one of fifo,"),
        ("lifo", "order: must be one of fifo,"),
        ("fifo patience", "patience: must be"),
        ("fifo patience=-1", "patience must be at least 0, not -1"),
        ("fifo tls_key=/etc/passwd", "tls_key: unknown"),
        ("fifo order=", "order: must be one of"),
    ],
)
def test_nothing_but_what_operators_set_is_supposed(policy: str, cause: str) -> None:
    with pytest.raises(InvalidRequest, match=cause) as error:
        asking(MadeUpSimulator()).supposed(["fifo", policy])
    assert error.value.field == "what_if"


def test_so_many_policies_at_once() -> None:
    assert len(asking(MadeUpSimulator()).supposed(["fifo"] * 8)) == 1
    with pytest.raises(OutOfRange, match="at most 8"):
        asking(MadeUpSimulator()).supposed(["fifo"] * 9)


async def test_one_is_simulated_at_a_time_and_few_wait() -> None:
    simulator = MadeUpSimulator()
    simulator.may_answer.clear()
    counterfactuals = asking(simulator)
    work = [asyncio.create_task(ask(counterfactuals, "hrrn")) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as error:
        await ask(counterfactuals, "hrrn")
    assert error.value.retry_after_s == 20.0
    assert simulator.running == 1
    # Who goes makes room.
    gone = work.pop()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    work.append(asyncio.create_task(ask(counterfactuals, "hrrn")))
    simulator.may_answer.set()
    assert [len(told) for told in await asyncio.gather(*work)] == [1] * 4
    assert len(simulator.asked) == 4


async def test_a_tenant_waits_with_one_question_and_others_are_not_kept() -> None:
    simulator = MadeUpSimulator()
    simulator.may_answer.clear()
    counterfactuals = asking(simulator)
    work = asyncio.create_task(ask(counterfactuals, "hrrn", request_id="acme/r"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await ask(counterfactuals, "hrrn", request_id="acme/s")
    other = asyncio.create_task(ask(counterfactuals, "hrrn", request_id="other/r"))
    simulator.may_answer.set()
    assert len(await work) == len(await other) == 1


async def inference(simulator: MadeUpSimulator | None) -> Inference:
    gateway = Gateway(await gateway_ledger(MemoryLedger(Clock())))
    counterfactuals = NO_COUNTERFACTUALS if simulator is None else asking(simulator)
    return Inference(gateway.requests, gateway.model, GRPC, counterfactuals=counterfactuals)


async def test_who_may_not_see_a_request_may_not_ask() -> None:
    simulator = MadeUpSimulator()
    caller = Caller("acme", frozenset({Scope.INFER}))
    message = pb.ExplainRequest(request_id="r", what_if=["hrrn"])
    with pytest.raises(UnknownRequest):
        await (await inference(simulator)).explain(caller, message)
    assert not simulator.asked


async def test_where_nobody_simulates_nobody_may_ask() -> None:
    message = pb.ExplainRequest(request_id="r", what_if=["hrrn"])
    with pytest.raises(Unsupported, match="what_if_timeout"):
        await (await inference(None)).explain(ANYONE, message)
