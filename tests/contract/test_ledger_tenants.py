"""Contract of all ledgers for tenants' limits and for access records."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from everlift.errors import RateLimited
from router.ledger.base import AccessRecords, Ledger
from router.ledger.quota import Charge, Settlement
from tests.support.ledger.ledgers import Tick, eventually, lose_answers

#: Long enough for calls before its end, short enough to wait for its end.
LEASE_S = 0.25
AGES_S = 3600.0
#: The bucket refills by one token in 6 s, which is none during a test.
SOME = {"tokens_per_minute": 10}
REQUESTS, TOKENS, AT_A_TIME = "requests_per_minute", "tokens_per_minute", "max_concurrent"


def charge(request_id: str, prompt: int = 1, output: int = 0, **limits: int) -> Charge:
    return Charge(f"acme/{request_id}", prompt, output, **limits)


async def take(ledger: Ledger, *args: object, **limits: int) -> None:
    """Charge a new request, which must be accepted."""
    assert await ledger.charge(charge(*args, **limits), AGES_S)  # type: ignore[arg-type]


async def refused(ledger: Ledger, *args: object, **limits: int) -> str:
    """Return the name of the limit that refuses a new request."""
    with pytest.raises(RateLimited) as refusal:
        await ledger.charge(charge(*args, **limits), AGES_S)  # type: ignore[arg-type]
    assert refusal.value.retry_after_s is not None and refusal.value.retry_after_s > 0
    return str(refusal.value).split()[-2]


async def settle(ledger: Ledger, request_id: str, output_tokens: int | None) -> None:
    await ledger.settle_charges([Settlement(f"acme/{request_id}", output_tokens)])


@pytest.mark.parametrize("number", [1, 3, 7])
@pytest.mark.parametrize("limit", [REQUESTS, TOKENS, AT_A_TIME])
async def test_limit_admits_exactly_its_number(ledger: Ledger, limit: str, number: int) -> None:
    for index in range(number):
        await take(ledger, f"r{index}", **{limit: number})
    assert await refused(ledger, "one more", **{limit: number}) == limit


async def test_charge_without_limit_is_not_counted(ledger: Ledger) -> None:
    await take(ledger, "a", 1000)
    await take(ledger, "b", 10, **SOME)


async def test_repeated_charge_is_counted_once(ledger: Ledger) -> None:
    limits = {REQUESTS: 1, TOKENS: 1, AT_A_TIME: 1}
    await take(ledger, "r", **limits)
    assert not await ledger.charge(charge("r", **limits), AGES_S)


@pytest.mark.parametrize("limit", [REQUESTS, TOKENS, AT_A_TIME])
async def test_refused_charge_uses_no_limit(ledger: Ledger, limit: str) -> None:
    others = {REQUESTS: 3, TOKENS: 3, AT_A_TIME: 3}
    await take(ledger, "a", **others)
    assert await refused(ledger, "refused", **others | {limit: 1}) == limit
    await take(ledger, "b", **others)
    await take(ledger, "c", **others)


async def test_refused_charge_names_limit_with_longest_wait(ledger: Ledger) -> None:
    await take(ledger, "a", 4, **{REQUESTS: 1, TOKENS: 4})
    assert await refused(ledger, "b", 2, **{REQUESTS: 1, TOKENS: 4}) == REQUESTS
    assert await refused(ledger, "b", 3, **{REQUESTS: 2, TOKENS: 4}) == TOKENS


async def test_refused_charge_retry_after_grows_with_shortfall(ledger: Ledger) -> None:
    await take(ledger, "a", 10, **SOME)
    waits = []
    for tokens in (1, 10):
        with pytest.raises(RateLimited) as refusal:
            await ledger.charge(charge("b", tokens, **SOME), AGES_S)
        waits.append(refusal.value.retry_after_s or 0.0)
    assert 0 < waits[0] <= 6.0
    assert 0 < waits[1] <= 60.0
    assert waits[1] > waits[0]


async def test_bucket_refills_over_time(ledger: Ledger, tick: Tick) -> None:
    limits = {TOKENS: 60_000}
    await take(ledger, "a", 60_000, **limits)
    # The bucket refills by 60,000 tokens in a minute, and by fewer during a stall of the test.
    assert await refused(ledger, "b", 60_000, **limits) == TOKENS

    async def is_taken() -> bool:
        try:
            return await ledger.charge(charge("b", 2000, **limits), AGES_S)
        except RateLimited:
            return False

    await eventually(is_taken, tick)


async def test_full_bucket_admits_oversized_request(
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


async def test_settlement_refunds_unused_tokens(ledger: Ledger) -> None:
    await take(ledger, "a", 2, 8, **SOME)
    assert await refused(ledger, "b", **SOME) == TOKENS
    await settle(ledger, "a", 3)
    await take(ledger, "b", 5, **SOME)
    assert await refused(ledger, "c", **SOME) == TOKENS


async def test_settlement_of_unstarted_request_refunds_all(ledger: Ledger) -> None:
    limits = SOME | {REQUESTS: 1, AT_A_TIME: 1}
    await take(ledger, "a", 10, **limits)
    await settle(ledger, "a", None)
    await take(ledger, "b", 10, **limits)


async def test_settlement_of_started_request_keeps_request_count(ledger: Ledger) -> None:
    await take(ledger, "a", **{REQUESTS: 1, AT_A_TIME: 1})
    await settle(ledger, "a", 0)
    assert await refused(ledger, "b", **{REQUESTS: 1, AT_A_TIME: 1}) == REQUESTS


async def test_settlement_is_applied_once(ledger: Ledger) -> None:
    await take(ledger, "a", 2, 8, **SOME)
    await take(ledger, "other", 0, **SOME)
    for _ in range(3):
        await settle(ledger, "a", 0)
    await take(ledger, "b", 8, **SOME)
    assert await refused(ledger, "c", **SOME) == TOKENS


async def test_settlement_without_charge_is_ignored(ledger: Ledger) -> None:
    await take(ledger, "a", 10, **SOME | {REQUESTS: 1})
    await settle(ledger, "another", None)
    assert await refused(ledger, "b", **SOME) == TOKENS
    assert await refused(ledger, "b", **{REQUESTS: 1}) == REQUESTS


async def test_settlement_refunds_only_charged_limits(ledger: Ledger) -> None:
    await take(ledger, "a", 5, 5, **SOME)
    await take(ledger, "b", 10)
    await settle(ledger, "b", None)
    assert await refused(ledger, "c", **SOME) == TOKENS


async def test_limits_are_separate_per_tenant(ledger: Ledger) -> None:
    limits = {REQUESTS: 1, TOKENS: 1, AT_A_TIME: 1}
    for tenant in ("acme", "acme.eu", "other"):
        assert await ledger.charge(replace(charge("r", **limits), request_id=f"{tenant}/r"), AGES_S)


async def test_settlements_of_many_tenants_share_one_call(ledger: Ledger) -> None:
    names = [f"tenant-{index}/r" for index in range(9)]
    charges = [replace(charge("r", **{AT_A_TIME: 1}), request_id=name) for name in names]
    for each in charges:
        await ledger.charge(each, AGES_S)
    await ledger.settle_charges([Settlement(name, 0) for name in names])
    for each in charges:
        assert await ledger.charge(replace(each, request_id=f"{each.request_id}-2"), AGES_S)
    await ledger.settle_charges([])
    await ledger.renew_charges([], AGES_S)


# slots and their leases


async def is_free(ledger: Ledger, request_id: str = "next") -> bool:
    try:
        return await ledger.charge(charge(request_id, **{AT_A_TIME: 1}), AGES_S)
    except RateLimited:
        return False


async def test_slot_counts_until_lease_expires(ledger: Ledger, tick: Tick) -> None:
    await take(ledger, "a", **{AT_A_TIME: 1})
    assert not await is_free(ledger)
    await ledger.renew_charges(["acme/a"], LEASE_S)
    await eventually(lambda: is_free(ledger), tick)


async def test_held_slot_does_not_expire(ledger: Ledger, tick: Tick) -> None:
    assert await ledger.charge(charge("a", **{AT_A_TIME: 2}), LEASE_S)
    assert await ledger.charge(charge("b", **{AT_A_TIME: 2}), LEASE_S)
    await ledger.renew_charges(["acme/a"], AGES_S)

    async def is_one_free() -> bool:
        try:
            return await ledger.charge(charge("c", **{AT_A_TIME: 2}), AGES_S)
        except RateLimited:
            return False

    await eventually(is_one_free, tick)
    assert await refused(ledger, "d", **{AT_A_TIME: 2}) == AT_A_TIME


async def test_resent_request_keeps_its_slot(ledger: Ledger, tick: Tick) -> None:
    # The first lease is longer than a stall between the two charges.
    assert await ledger.charge(charge("a", **{AT_A_TIME: 1}), 5.0)
    assert not await ledger.charge(charge("a", **{AT_A_TIME: 1}), AGES_S)
    for _ in range(600):
        await tick()
    assert not await is_free(ledger)


async def test_renew_charges_restores_expired_slot(ledger: Ledger, tick: Tick) -> None:
    assert await ledger.charge(charge("a", **{AT_A_TIME: 1}), LEASE_S)
    await eventually(lambda: is_free(ledger), tick)
    await ledger.renew_charges(["acme/a"], AGES_S)
    await settle(ledger, "next", 0)
    assert not await is_free(ledger, "third")


async def test_expired_slot_is_not_refunded(ledger: Ledger, tick: Tick) -> None:
    limits = SOME | {AT_A_TIME: 1}
    assert await ledger.charge(charge("a", 0, 10, **limits), LEASE_S)
    await eventually(lambda: is_free(ledger), tick)
    await settle(ledger, "a", 0)
    assert await refused(ledger, "c", **SOME) == TOKENS


async def test_charge_with_lost_answer_is_applied_once(ledger: Ledger) -> None:
    lose_answers(ledger)
    limits = SOME | {REQUESTS: 2, AT_A_TIME: 2}
    await take(ledger, "a", 1, 4, **limits)
    await take(ledger, "b", 1, 4, **limits)
    await settle(ledger, "a", 0)
    await take(ledger, "c", 4, **SOME)
    assert await refused(ledger, "d", **SOME) == TOKENS


async def test_concurrent_charges_respect_limits(ledger: Ledger) -> None:
    charges = [charge(f"r{index}", **{REQUESTS: 3, AT_A_TIME: 5}) for index in range(10)]
    answers = await asyncio.gather(
        *(ledger.charge(each, AGES_S) for each in charges), return_exceptions=True
    )
    assert sorted(map(str, map(type, answers))).count(str(bool)) == 3


# access records


async def test_access_records_are_put_changed_and_removed(ledger: Ledger) -> None:
    assert await ledger.access() == AccessRecords(0, {})
    await ledger.put_access({"keys/a": "ä", "tenants/*": "{}"})
    await ledger.put_access({"keys/b": "b", "keys/a": None})
    records = await ledger.access()
    assert records is not None
    assert records.texts == {"keys/b": "b", "tenants/*": "{}"}


async def test_access_version_increases_with_each_change(ledger: Ledger) -> None:
    known = -1
    for text in ("1", "2", "2", None):
        await ledger.put_access({"keys/a": text})
        records = await ledger.access(known)
        assert records is not None and records.version > known
        known = records.version
        assert await ledger.access(known) is None
