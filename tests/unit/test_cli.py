"""The command line against a fake router."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster import endpoint
from cluster.cli import app
from everlift.errors import QueueFull
from everlift.testing import Break, FakeRouter, Refuse

COMMANDS = ["up", "generate", "attach", "cancel", "status"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("EVERLIFT_ADDRESS", raising=False)


async def run(*arguments: str, **environ: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environ)


async def failure(*arguments: str, **environ: str) -> str:
    """What a command that fails says: one line, without a traceback."""
    result = await run(*arguments, **environ)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


async def test_generate_streams_the_text_and_nothing_else() -> None:
    async with FakeRouter(faults=[Break(1)]) as router:
        result = await run("generate", "one two three", "--address", router.address)
    assert (result.exit_code, result.output) == (0, "one two three\n")


async def test_generates_options_reach_the_router() -> None:
    async with FakeRouter() as router:
        options = "--max-tokens 2 --temperature 0.5 --top-p 0.25 --top-k 3 --min-p 0.125 --seed 9"
        more = "--stop x --stop y --timeout 60 --request-id r"
        command = ["generate", "one two three", *options.split(), *more.split()]
        result = await run(*command, EVERLIFT_ADDRESS=router.address)
        got = router.requests["r"].submission
    assert result.stdout == "one two\n"
    assert (got.max_tokens, got.stop) == (2, ("x", "y"))
    assert got.timeout_s == pytest.approx(60, abs=5)
    sampling = got.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.min_p, sampling.seed) == (0.125, 9)


async def test_a_request_can_be_attached_to_and_cancelled() -> None:
    async with FakeRouter() as router:
        place = ("--address", router.address)
        await run("generate", "one two three", "--request-id", "r", *place)
        assert (await run("attach", "r", "--from-offset", "1", *place)).stdout == " two three\n"
        assert (await run("cancel", "r", *place)).stdout == "finished\n"
        assert await failure("cancel", "other", *place) == "no request other"
        assert await failure("attach", "other", *place) == "no request other"


async def test_status_shows_the_cluster() -> None:
    async with FakeRouter() as router:
        await run("generate", "one", "--address", router.address)
        result = await run("status", "--address", router.address)
    assert result.exit_code == 0
    assert "completed 1" in result.stdout


async def test_the_cluster_on_this_machine_is_found(tmp_path: Path) -> None:
    (tmp_path / "everlift").mkdir()
    async with FakeRouter() as router:
        with endpoint.published(tmp_path / "everlift", [router.address]):
            assert (await run("generate", "one two")).stdout == "one two\n"


async def test_a_routers_error_is_said_in_one_line() -> None:
    async with FakeRouter(faults=[Refuse(QueueFull("9 requests [wait]"))]) as router:
        place = ("--address", router.address)
        assert await failure("generate", "x", *place) == "9 requests [wait]"
        assert "stop string is empty" in await failure("generate", "x", "--stop", "", *place)
        assert "request_id must be" in await failure("attach", "no id", *place)


@pytest.mark.parametrize(
    "command", ["generate x", "attach x", "cancel x", "status", "status --watch"]
)
async def test_without_a_cluster_a_command_says_how_to_start_one(command: str) -> None:
    said = await failure(*command.split(), "--address", "127.0.0.1:1")
    assert said == "no cluster answers at 127.0.0.1:1: start one with `everlift up`"


async def test_a_setting_that_does_not_exist_is_said_with_the_nearest() -> None:
    said = await failure("up", "--set", "worker.max_num_seq=3")
    assert said == "worker.max_num_seq: unknown key; did you mean worker.max_num_seqs?"
    said = await failure("status", EVERLIFT_LEDGER__URI="x")
    assert said == "EVERLIFT_LEDGER__URI: unknown key; did you mean EVERLIFT_LEDGER__URL?"
    assert "No such file" in await failure("up", "--config", "nowhere.yaml")


@pytest.mark.parametrize("command", COMMANDS)
async def test_help_shows_an_example(command: str) -> None:
    result = await run(command, "--help", COLUMNS="200")
    assert result.exit_code == 0
    assert f"everlift {command}" in result.stdout


async def test_every_command_stands_in_the_help() -> None:
    shown = (await run("--help")).stdout
    assert all(command in shown for command in COMMANDS)


async def test_a_misspelt_command_names_the_right_one() -> None:
    result = await run("generat", "x")
    assert result.exit_code == 2
    assert "generate" in result.stderr
