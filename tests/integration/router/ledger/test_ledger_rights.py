"""ACL rights of the ledger's user; client input is never part of a script."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from everlift.v1 import inference_pb2 as pb
from router.ledger.embedded import embedded
from router.ledger.redis import scripts
from router.ledger.redis.scripts import Script
from tests.support.in_process import ROUTER, Cluster
from tests.support.ledger.ledger_servers import DURABLE, USER, readme_rule, server
from tests.support.ledger.ledgers import connected, valkey_server
from tests.support.router.fronts import Fronts

SCRIPTS = [each for each in vars(scripts).values() if isinstance(each, Script)]
LOGIN = f"{USER}:secret@"


@contextmanager
def debians() -> Iterator[str]:
    """Yield the URL of Debian's redis-server, with the user that the README specifies."""
    with server(*DURABLE, f"user {USER} on >secret {readme_rule()}") as one:
        yield f"redis://{LOGIN}{one.address}"


SERVERS = {"embedded": valkey_server, "redis": debians}
Start = Callable[[], AbstractContextManager[str]]


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    start: Start = SERVERS[request.param]
    with start() as url:
        yield url


NOT_FOR_US = """
EVAL,return 1,0
EVAL_RO,return 1,0
FCALL,f,0
FUNCTION,LOAD,#!lua name=a
FUNCTION,LIST
SCRIPT,FLUSH
SCRIPT,KILL
SCRIPT,DEBUG,YES
CONFIG,SET,dir,/tmp
CONFIG,REWRITE
CONFIG,RESETSTAT
ACL,LIST
ACL,SETUSER,other
MODULE,LIST
MODULE,LOAD,/tmp/a.so
MONITOR
CLIENT,LIST
CLIENT,KILL,ID,1
SHUTDOWN
SAVE
BGSAVE
BGREWRITEAOF
REPLICAOF,127.0.0.1,1
SYNC
MIGRATE,127.0.0.1,1,a,0,1
RESTORE,a,0,b
DUMP,a
SORT,a
KEYS,*
FLUSHALL
FLUSHDB
SWAPDB,0,0
RENAME,a,b
COPY,a,b
OBJECT,HELP
SLOWLOG,GET
LATENCY,LATEST
PUBLISH,a,b
SUBSCRIBE,a
""".split("\n")[1:-1]


#: Errors of the ACL, and of commands that servers refuse to all users.
REFUSED = re.compile("permission|not allowed|can.t run")


def test_ledger_user_is_limited_to_ledger_commands(url: str) -> None:
    with Redis.from_url(url) as redis:
        for line in NOT_FOR_US:
            with pytest.raises(ResponseError, match=REFUSED):
                redis.execute_command(*line.split(","))
        # Scripts have the same rights.
        for line in NOT_FOR_US:
            words = ", ".join(f"'{word}'" for word in line.split(","))
            sha = redis.script_load(f"return redis.call({words})")
            with pytest.raises(ResponseError, match=REFUSED):
                redis.evalsha(sha, 0)


def test_embedded_acl_is_readme_acl_plus_audit_commands() -> None:
    readme, ours = (set(re.findall(r"\+[\w|]+", it)) for it in (readme_rule(), embedded._COMMANDS))
    assert ours - readme == {"+config|get", "+ping", "+scan", "+sscan", "+zscan"}
    assert readme <= ours


def test_ledger_scripts_load_no_code() -> None:
    assert len(SCRIPTS) > 20
    for each in SCRIPTS:
        assert each.sha == hashlib.sha1(each.source.encode()).hexdigest()
        assert not re.search(
            r"\b(load|loadstring|dofile|require|setfenv|debug)\b\s*[\.(]", each.source
        )


#: Lua and RESP injection, with all string terminators.
HOSTILE = "']]\" .. redis.call('SET', 'owned', 1) .. \"\r\n*1\r\n$8\r\nFLUSHALL\r\n{x}\x01"
LABEL = "redis.call"


async def test_client_input_is_never_run_as_script() -> None:
    with server(*DURABLE, f"user {USER} on >secret {readme_rule()}") as one:
        async with connected(f"redis://{LOGIN}{one.address}") as ledger:
            parts = Cluster(ledger=ledger, router_config=replace(ROUTER, drain=0.1))
            try:
                await parts.add_router()
                await parts.add_worker()
                await everywhere(Fronts.of(parts))
            finally:
                await parts.stop()
        # The default user has all rights on this server.
        with one.client() as redis:
            known = redis.script_exists(*(each.sha for each in SCRIPTS))
            assert 5 < redis.info("memory")["number_of_cached_scripts"] == sum(known)
            assert not {"cmdstat_eval", "cmdstat_flushall"} & redis.info("commandstats").keys()
            assert not redis.exists("owned")


async def everywhere(fronts: Fronts) -> None:
    """Send hostile text in accepted and rejected fields of each API."""
    texts = {"text": HOSTILE, "stop": [HOSTILE], "cache_salt": HOSTILE}
    names = {"session_id": HOSTILE, "fairness_id": HOSTILE, "application": HOSTILE}
    for more in (texts, names, texts | names):
        message = pb.GenerateRequest(**{"text": "a", "max_tokens": 2} | more)
        assert await fronts.native(message) is None
    for field in ("request_id", "model"):
        message = pb.GenerateRequest(**{"text": "a", field: HOSTILE})
        assert await fronts.native(message) is not None
    assert await fronts.native(pb.GenerateRequest(text="a", request_id=LABEL, max_tokens=2)) is None
    kserve: dict[str, object] = {"stop": HOSTILE, "cache_salt": HOSTILE, "max_tokens": 2}
    assert await fronts.kserve(kserve, HOSTILE.encode()) is None
    fields: dict[str, Any] = {"prompt": HOSTILE, "stop": HOSTILE, "cache_salt": HOSTILE}
    assert await fronts.completion(**fields, user=HOSTILE, metadata=HOSTILE, max_tokens=2) is None
