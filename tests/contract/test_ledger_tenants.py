"""What every ledger does about tenants' limits, and about who may come in."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from everlift.errors import RateLimited
from router.ledger.base import AccessRecords, Ledger
from router.ledger.quota import Charge, Settlement
from tests.support.ledger.ledgers import Tick, eventually, lose_answers

#: Long enough to act within, short enough to wait for.
LEASE_S = 0.25
AGES_S = 3600.0
#: Of ten in a minute one comes in 6 s: none while a test runs.
SOME = {"tokens_per_minute": 10}
REQUESTS, TOKENS, AT_A_TIME = "requests_per_minute", "tokens_per_minute", "max_concurrent"


def charge(request_id: str, prompt: int = 1, output: int = 0, **limits: int) -> Charge:
    return Charge(f"acme/{request_id}", prompt, output, **limits)


async def take(ledger: Ledger, *args: object, **limits: int) -> None:
    """Of a new request."""
    assert await ledger.charge(charge(*args, **limits), AGES_S)  # type: ignore[arg-type]


async def refused(ledger: Ledger, *args: object, **limits: int) -> str:
    """By which limit."""
    with pytest.raises(RateLimited) as refusal:
        await ledger.charge(charge(*args, **limits), AGES_S)  # type: ignore[arg-type]
    assert refusal.value.retry_after_s is not None and refusal.value.retry_after_s > 0
    return str(refusal.value).split()[-2]


async def settle(ledger: Ledger, request_id: str, output_tokens: int | None) -> None:
    await ledger.settle_charges([Settlement(f"acme/{request_id}", output_tokens)])


@pytest.mark.parametrize("number", [1, 3, 7])
@pytest.mark.parametrize("limit", [REQUESTS, TOKENS, AT_A_TIME])
async def test_a_limit_lets_so_many_in_and_no_more(ledger: Ledger, limit: str, number: int) -> None:
    for index in range(number):
        await take(ledger, f"r{index}", **{limit: number})
    assert await refused(ledger, "one more", **{limit: number}) == limit


async def test_what_is_not_limited_is_not_counted(ledger: Ledger) -> None:
    await take(ledger, "a", 1000)
    await take(ledger, "b", 10, **SOME)


async def test_a_request_takes_once_what_it_takes(ledger: Ledger) -> None:
    limits = {REQUESTS: 1, TOKENS: 1, AT_A_TIME: 1}
    await take(ledger, "r", **limits)
    assert not await ledger.charge(charge("r", **limits), AGES_S)


@pytest.mark.parametrize("limit", [REQUESTS, TOKENS, AT_A_TIME])
async def test_who_is_refused_by_one_limit_takes_of_none(ledger: Ledger, limit: str) -> None:
    others = {REQUESTS: 3, TOKENS: 3, AT_A_TIME: 3}
    await take(ledger, "a", **others)
    assert await refused(ledger, "refused", **others | {limit: 1}) == limit
    await take(ledger, "b", **others)
    await take(ledger, "c", **others)


async def test_the_limit_to_wait_for_longest_is_told(ledger: Ledger) -> None:
    await take(ledger, "a", 4, **{REQUESTS: 1, TOKENS: 4})
    assert await refused(ledger, "b", 2, **{REQUESTS: 1, TOKENS: 4}) == REQUESTS
    assert await refused(ledger, "b", 3, **{REQUESTS: 2, TOKENS: 4}) == TOKENS


async def test_a_wait_is_until_there_is_enough(ledger: Ledger) -> None:
    await take(ledger, "a", 10, **SOME)
    waits = []
    for tokens in (1, 10):
        with pytest.raises(RateLimited) as refusal:
            await ledger.charge(charge("b", tokens, **SOME), AGES_S)
        waits.append(refusal.value.retry_after_s or 0.0)
    assert 0 < waits[0] <= 6.0
    assert 0 < waits[1] <= 60.0
    assert waits[1] > waits[0]


async def test_a_bucket_fills_again(ledger: Ledger, tick: Tick) -> None:
    limits = {TOKENS: 60_000}
    await take(ledger, "a", 60_000, **limits)
    assert await refused(ledger, "b", 2000, **limits) == TOKENS

    async def is_taken() -> bool:
        try:
            return await ledger.charge(charge("b", 2000, **limits), AGES_S)
        except RateLimited:
            return False

    await eventually(is_taken, tick)


async def test_bucket_takes_a_large_request_when_full(
    ledger: Ledger,
) -> None:
    await take(ledger, "a", 25, **SOME)
    with pytest.raises(RateLimited) as refusal:
        await ledger.charge(charge("b", **SOME), AGES_S)
    assert (refusal.value.retry_after_s or 0.0) > 60.0
    await settle(ledger, "a", None)
    await take(ledger, "c", 1, **SOME)
    assert await refused(ledger, "d", 25, **SOME) == TOKENS


# the end of a request


async def test_what_was_not_used_is_given_back(ledger: Ledger) -> None:
    await take(ledger, "a", 2, 8, **SOME)
    assert await refused(ledger, "b", **SOME) == TOKENS
    await settle(ledger, "a", 3)
    await take(ledger, "b", 5, **SOME)
    assert await refused(ledger, "c", **SOME) == TOKENS


async def test_what_never_began_takes_nothing(ledger: Ledger) -> None:
    limits = SOME | {REQUESTS: 1, AT_A_TIME: 1}
    await take(ledger, "a", 10, **limits)
    await settle(ledger, "a", None)
    await take(ledger, "b", 10, **limits)


async def test_a_request_that_ended_began(ledger: Ledger) -> None:
    await take(ledger, "a", **{REQUESTS: 1, AT_A_TIME: 1})
    await settle(ledger, "a", 0)
    assert await refused(ledger, "b", **{REQUESTS: 1, AT_A_TIME: 1}) == REQUESTS


async def test_an_end_is_told_once(ledger: Ledger) -> None:
    await take(ledger, "a", 2, 8, **SOME)
    await take(ledger, "other", 0, **SOME)
    for _ in range(3):
        await settle(ledger, "a", 0)
    await take(ledger, "b", 8, **SOME)
    assert await refused(ledger, "c", **SOME) == TOKENS


async def test_the_end_of_what_was_never_charged_is_nothing(ledger: Ledger) -> None:
    await take(ledger, "a", 10, **SOME | {REQUESTS: 1})
    await settle(ledger, "another", None)
    assert await refused(ledger, "b", **SOME) == TOKENS
    assert await refused(ledger, "b", **{REQUESTS: 1}) == REQUESTS


async def test_an_end_gives_back_by_the_limits_that_it_was_charged_by(ledger: Ledger) -> None:
    await take(ledger, "a", 5, 5, **SOME)
    await take(ledger, "b", 10)
    await settle(ledger, "b", None)
    assert await refused(ledger, "c", **SOME) == TOKENS


async def test_one_tenants_requests_are_none_of_the_others(ledger: Ledger) -> None:
    limits = {REQUESTS: 1, TOKENS: 1, AT_A_TIME: 1}
    for tenant in ("acme", "acme.eu", "other"):
        assert await ledger.charge(replace(charge("r", **limits), request_id=f"{tenant}/r"), AGES_S)


async def test_ends_of_many_tenants_are_told_in_one_call(ledger: Ledger) -> None:
    names = [f"tenant-{index}/r" for index in range(9)]
    charges = [replace(charge("r", **{AT_A_TIME: 1}), request_id=name) for name in names]
    for each in charges:
        await ledger.charge(each, AGES_S)
    await ledger.settle_charges([Settlement(name, 0) for name in names])
    for each in charges:
        assert await ledger.charge(replace(each, request_id=f"{each.request_id}-2"), AGES_S)
    await ledger.settle_charges([])
    await ledger.hold([], AGES_S)


# slots and their leases


async def is_free(ledger: Ledger, request_id: str = "next") -> bool:
    try:
        return await ledger.charge(charge(request_id, **{AT_A_TIME: 1}), AGES_S)
    except RateLimited:
        return False


async def test_what_nobody_holds_counts_until_its_lease_is_over(ledger: Ledger, tick: Tick) -> None:
    assert await ledger.charge(charge("a", **{AT_A_TIME: 1}), LEASE_S)
    assert not await is_free(ledger)
    await eventually(lambda: is_free(ledger), tick)


async def test_what_is_held_counts_on(ledger: Ledger, tick: Tick) -> None:
    assert await ledger.charge(charge("a", **{AT_A_TIME: 2}), LEASE_S)
    assert await ledger.charge(charge("b", **{AT_A_TIME: 2}), LEASE_S)
    await ledger.hold(["acme/a"], AGES_S)

    async def is_one_free() -> bool:
        try:
            return await ledger.charge(charge("c", **{AT_A_TIME: 2}), AGES_S)
        except RateLimited:
            return False

    await eventually(is_one_free, tick)
    assert await refused(ledger, "d", **{AT_A_TIME: 2}) == AT_A_TIME


async def test_what_is_sent_again_counts_on(ledger: Ledger, tick: Tick) -> None:
    assert await ledger.charge(charge("a", **{AT_A_TIME: 1}), LEASE_S)
    assert not await ledger.charge(charge("a", **{AT_A_TIME: 1}), AGES_S)
    for _ in range(40):
        await tick()
    assert not await is_free(ledger)


async def test_what_was_taken_for_dead_counts_again_when_it_is_held(
    ledger: Ledger, tick: Tick
) -> None:
    assert await ledger.charge(charge("a", **{AT_A_TIME: 1}), LEASE_S)
    await eventually(lambda: is_free(ledger), tick)
    await ledger.hold(["acme/a"], AGES_S)
    await settle(ledger, "next", 0)
    assert not await is_free(ledger, "third")


async def test_what_was_taken_for_dead_gives_nothing_back(ledger: Ledger, tick: Tick) -> None:
    limits = SOME | {AT_A_TIME: 1}
    assert await ledger.charge(charge("a", 0, 10, **limits), LEASE_S)
    await eventually(lambda: is_free(ledger), tick)
    await settle(ledger, "a", 0)
    assert await refused(ledger, "c", **SOME) == TOKENS


async def test_a_charge_whose_answer_was_lost_is_made_once(ledger: Ledger) -> None:
    lose_answers(ledger)
    limits = SOME | {REQUESTS: 2, AT_A_TIME: 2}
    await take(ledger, "a", 1, 4, **limits)
    await take(ledger, "b", 1, 4, **limits)
    await settle(ledger, "a", 0)
    await take(ledger, "c", 4, **SOME)
    assert await refused(ledger, "d", **SOME) == TOKENS


async def test_of_many_at_once_as_many_come_in_as_may(ledger: Ledger) -> None:
    charges = [charge(f"r{index}", **{REQUESTS: 3, AT_A_TIME: 5}) for index in range(10)]
    answers = await asyncio.gather(
        *(ledger.charge(each, AGES_S) for each in charges), return_exceptions=True
    )
    assert sorted(map(str, map(type, answers))).count(str(bool)) == 3


# who may come in


async def test_records_are_put_changed_and_removed(ledger: Ledger) -> None:
    assert await ledger.access() == AccessRecords(0, {})
    await ledger.put_access({"keys/a": "ä", "tenants/*": "{}"})
    await ledger.put_access({"keys/b": "b", "keys/a": None})
    records = await ledger.access()
    assert records is not None
    assert records.texts == {"keys/b": "b", "tenants/*": "{}"}


async def test_each_change_has_a_version_of_its_own(ledger: Ledger) -> None:
    known = -1
    for text in ("1", "2", "2", None):
        await ledger.put_access({"keys/a": text})
        records = await ledger.access(known)
        assert records is not None and records.version > known
        known = records.version
        assert await ledger.access(known) is None
