"""The command line against a fake router."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster import endpoint
from cluster.cli import app
from cluster.config import DEMO_MODEL
from cluster.connection import addresses
from cluster.options import OPTIONS
from everlift.errors import Forbidden, RequestConflict
from everlift.options import GenerateOptions
from everlift.sampling import Grammar, GrammarKind
from everlift.testing import Break, FakeRouter, Refuse
from everlift.v1 import inference_pb2 as pb
from router.requests.tokenizer import ByteTokenizer
from tests.support.images import png
from tests.support.router.restored_logging import restored_logging
from worker.runner.fake_runner import expected_tokens

COMMANDS = ["up", "generate", "chat", "batch", "attach", "cancel", "forget", "status", "models"]
COMMANDS += ["tokenize", "simulate", "measure", "plan", "replay"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("EVERLIFT_ADDRESS", raising=False)
    with restored_logging():
        yield


async def run(*arguments: str, **environ: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environ)


async def failure(*arguments: str, **environ: str) -> str:
    """Return the message of a failing command: one line, without a traceback."""
    result = await run(*arguments, **environ)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


async def test_cli_version_is_printed() -> None:
    result = await run("--version")
    assert (result.exit_code, result.stdout) == (0, f"everlift {version('everlift')}\n")


def test_cli_help_groups_every_command() -> None:
    commands = [*app.registered_commands, *app.registered_groups]
    groups = ["Serve", "Ask", "Look", "Operate", "Forecast", "Bench"]
    assert {command.rich_help_panel for command in commands} == set(groups)


def test_client_commands_do_not_import_cluster_or_engine() -> None:
    script = """
import sys, cluster.cli
others = {"torch", "ray", "redis", "tokenizers", "worker.serving.rank", "cluster.llm.llm", "yaml"}
assert not others & sys.modules.keys(), others & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


async def test_cli_rejects_picture_paths_with_other_suffixes(tmp_path: Path) -> None:
    for command in (("demo", "--picture"), ("explain", "r", "--png")):
        for name in ("x.foo", "x"):
            message = await failure(*command, str(tmp_path / name))
            assert message.startswith(f"{command[-1]}: must end with one of .png ")
    assert not list(tmp_path.iterdir())


def test_addresses_are_split_at_commas_ignoring_spaces() -> None:
    assert addresses("a:1,b:2") == addresses(" a:1, b:2 ") == ["a:1", "b:2"]


async def test_generate_prints_only_the_text() -> None:
    async with FakeRouter(faults=[Break(1)]) as router:
        result = await run("generate", "one two three", "--address", router.address)
    assert (result.exit_code, result.output) == (0, "one two three\n")


async def test_generate_options_reach_the_router() -> None:
    async with FakeRouter() as router:
        options = "--max-tokens 2 --temperature 0.5 --top-p 0.25 --top-k 3 --min-p 0.125 --seed 9"
        more = "--stop x --stop y --timeout 60 --request-id r --priority -3 --ttft-target 1.5"
        command = ["generate", "one two three", "--model=sql", *options.split(), *more.split()]
        result = await run(*command, EVERLIFT_ADDRESS=router.address)
        got = router.requests["r"].submission
    assert (result.stdout, got.model) == ("one two\n", "sql")
    assert (got.max_tokens, got.stop) == (2, ("x", "y"))
    assert got.timeout_s == pytest.approx(60, abs=5)
    assert (got.priority, got.ttft_target_s) == (-3, 1.5)
    sampling = got.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.min_p, sampling.seed) == (0.125, 9)


async def test_generate_output_constraints_reach_the_router(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    sampling = "--repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -0.5"
    biases = "--logit-bias 5=-1.5 --logit-bias 7=2 --min-tokens 2 --logprobs 3 --prompt-logprobs 0"
    ends = "--include-stop --ignore-eos --stop-token-id 4 --stop-token-id 6 --cache-salt s"
    forms = {
        "a": ["--json-schema", f"@{tmp_path / 'schema.json'}"],
        "b": ["--json-schema", "true"],
        "c": ["--regex", "[0-9]+"],
        "d": ["--ebnf", 'root ::= "x"'],
        "e": ["--choice", "yes", "--choice", "no"],
    }
    async with FakeRouter() as router:
        for request_id, form in forms.items():
            options = [*sampling.split(), *biases.split(), *ends.split(), *form]
            place = ["--address", router.address, "--request-id", request_id]
            result = await run("generate", "x", *options, *place)
            assert result.exit_code == 0, result.output
        got = {each: router.requests[each].submission for each in forms}
    first = got["a"]
    assert (first.include_stop, first.ignore_eos, first.cache_salt) == (True, True, "s")
    assert first.stop_token_ids == (4, 6)
    assert first.sampling.logit_bias == ((5, -1.5), (7, 2.0))
    assert (first.sampling.repetition_penalty, first.sampling.presence_penalty) == (1.5, 0.5)
    assert (first.sampling.frequency_penalty, first.sampling.min_tokens) == (-0.5, 2)
    assert (first.sampling.logprobs, first.sampling.prompt_logprobs) == (3, 0)
    assert {each: submission.sampling.grammar for each, submission in got.items()} == {
        "a": Grammar(GrammarKind.JSON_SCHEMA, ('{"type": "object"}',)),
        "b": Grammar(GrammarKind.JSON_SCHEMA, ("true",)),
        "c": Grammar(GrammarKind.REGEX, ("[0-9]+",)),
        "d": Grammar(GrammarKind.EBNF, ('root ::= "x"',)),
        "e": Grammar(GrammarKind.CHOICE, ("yes", "no")),
    }


async def test_generate_sends_the_files_of_images(tmp_path: Path) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for seed, file in enumerate(files):
        file.write_bytes(png(seed))
    images = [word for file in files for word in ("--image", str(file))]
    async with FakeRouter() as router:
        place = ["--address", router.address, "--request-id", "a"]
        result = await run("generate", "x", *images, *place)
        assert result.exit_code == 0, result.output
        sent = router.requests["a"].submission.images
        result = await run("generate", "x", "--image", str(tmp_path / "none"), *place)
    assert [image.data for image in sent] == [png(0), png(1)]
    assert result.exit_code != 0 and "none" in result.output


def test_generate_has_a_flag_for_every_client_option() -> None:
    """Options that the command sets itself are the exception."""
    settled = {"model", "on_disconnect", "explain"}
    assert OPTIONS.keys() == GenerateOptions.__annotations__.keys() - settled


async def test_generate_prints_choices_in_sequence() -> None:
    async with FakeRouter() as router:
        result = await run("generate", "one two", "--n", "2", "--address", router.address)
    assert result.stdout == "--- choice 0 (stop)\none two\n--- choice 1 (stop)\none two\n"


async def test_generate_prints_choices_as_json() -> None:
    async with FakeRouter() as router:
        command = ["generate", "one é", "--n", "2", "--json", "--address", router.address]
        result = await run(*command)
    assert list(map(json.loads, result.stdout.splitlines())) == [
        {"choice": index, "text": "one é", "finish_reason": "stop"} for index in range(2)
    ]


HERE = ("--local", "--model", "fake")


async def test_generate_local_answers_without_a_cluster() -> None:
    result = await run("generate", "hello", *HERE, "--temperature", "0", "--max-tokens", "5")
    expected = ByteTokenizer().decode(expected_tokens(list(b"hello"), 5))
    assert (result.exit_code, result.stdout, result.stderr) == (0, expected + "\n", "")
    more = await run("generate", "hello", *HERE, "--n", "2", "--max-tokens", "5", "--json")
    assert [json.loads(line)["choice"] for line in more.stdout.splitlines()] == [0, 1]


async def test_generate_explains_an_empty_output() -> None:
    options = ["--temperature", "0", "--max-tokens", "5"]
    first = (await run("generate", "hello", *HERE, *options)).stdout[0]
    result = await run("generate", "hello", *HERE, *options, "--stop", first)
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert result.stderr.startswith("the output is empty: the model ended it at once")


async def test_generate_prints_logprobs_one_line_per_token() -> None:
    options = ["--logprobs", "1", "--prompt-logprobs", "0", "--temperature", "0"]
    result = await run("generate", "abc", *HERE, "--max-tokens", "2", *options)
    tokens = expected_tokens(list(b"abc"), 2)
    text, *lines = result.stdout.splitlines()
    assert text == ByteTokenizer().decode(tokens)
    title, heads, *rows = lines[:4]
    assert title == "log probabilities of the output:"
    assert heads.split() == ["token", "logprob", "rank", "most", "likely", "tokens"]
    assert [row.split()[0] for row in rows] == list(map(str, tokens))
    title, _, *rows = lines[4:]
    assert title == "log probabilities of the prompt, from its second token on:"
    assert [row.split()[0] for row in rows] == [str(ord("b")), str(ord("c"))]
    described = await run("generate", "abc", *HERE, "--max-tokens", "2", *options, "--json")
    fields = json.loads(described.stdout)
    assert [each["token"] for each in fields["logprobs"]] == tokens
    assert len(fields["prompt_logprobs"]) == 2


async def test_generate_reports_invalid_options_in_one_line(tmp_path: Path) -> None:
    said = await failure("generate", "x", "--set", "worker.heartbeat=1")
    assert said.startswith("--set needs --local: model and settings of a cluster")
    assert "no such directory" in await failure("generate", "x", "--local", "--model", "/none")
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x08")
    broken = str(tmp_path / "model")
    assert "model.safetensors" in await failure("generate", "x", "--local", "--model", broken)
    assert "stop string is empty" in await failure("generate", "x", *HERE, "--stop", "")
    assert "--logit-bias must be ID=VALUE" in await failure("generate", "x", "--logit-bias", "5")
    assert "No such file" in await failure("generate", "x", "--json-schema", "@/none")


async def test_generate_json_schema_file_must_be_readable_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    schema = ("generate", "x", "--json-schema")
    assert await failure(*schema, f"@{tmp_path}/binary") == f"{tmp_path}/binary is not UTF-8"
    assert (await failure(*schema, "@~nouser/x")).startswith("~nouser/x: the home directory")


#: Argument that is not UTF-8: Python's decoding of the byte 0xff.
NO_TEXT = "\udcff"


@pytest.mark.parametrize(
    "command",
    [
        ("tokenize", NO_TEXT),
        ("cancel", NO_TEXT),
        ("forget", NO_TEXT),
        ("drain", NO_TEXT),
        ("explain", NO_TEXT),
        ("requests", "--tenant", NO_TEXT),
        ("chaos", "kill", NO_TEXT),
        ("chaos", "partition", "any-router", "--peer", NO_TEXT),
    ],
)
async def test_cli_rejects_non_utf8_text_in_one_line(command: tuple[str, ...]) -> None:
    async with FakeRouter() as router:
        said = await failure(*command, "--address", router.address)
    assert said == "a text contains characters that UTF-8 cannot encode"


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("detokenize", 99_999_999_999),
        ("attach r --from-offset", 1 << 70),
        ("chaos kill leader --rank", 99_999_999_999),
        ("chaos pause leader --rank", 99_999_999_999),
    ],
)
async def test_cli_rejects_out_of_range_numbers_in_one_line(command: str, number: int) -> None:
    async with FakeRouter() as router:
        said = await failure(*command.split(), str(number), "--address", router.address)
    assert said == f"Value out of range: {number}"


async def test_cli_policy_rejects_out_of_range_number_in_one_line() -> None:
    async with FakeRouter() as router:
        said = await failure("policy", "--max-queued", str(1 << 70), "--address", router.address)
    assert said == "max_queued must be below 4.29497e+09, not 1.18059e+21"


async def test_bench_serve_rejects_out_of_range_numbers_in_one_line() -> None:
    load = ("bench", "serve", "--requests", "3", "--output-tokens", "99999999999")
    async with FakeRouter() as router:
        said = await failure(*load, "--address", router.address)
    assert "out_of_range" in said


async def test_cli_rejects_an_invalid_ledger_url_in_one_line(tmp_path: Path) -> None:
    for command in ("chaos check", f"train-predictor {tmp_path}/out --set model=fake"):
        said = await failure(*command.split(), "--ledger", "foo")
        assert said.startswith("--ledger: url must be embedded, or begin with one of unix://")


async def test_cli_without_a_home_directory_names_state_dir(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.getuid", lambda: 4711)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    said = await failure("status")
    assert said == "state_dir: must be set, or HOME: user 4711 has no home directory"


async def test_cli_attaches_to_cancels_and_forgets_a_request() -> None:
    async with FakeRouter() as router:
        place = ("--address", router.address)
        await run("generate", "one two three", "--request-id", "r", *place)
        assert (await run("attach", "r", "--from-offset", "1", *place)).stdout == " two three\n"
        assert (await run("cancel", "r", *place)).stdout == "finished\n"
        assert (await run("forget", "r", *place)).stdout == "forgotten\n"
        assert await failure("cancel", "r", *place) == "no request r"
        assert await failure("attach", "other", *place) == "no request other"


async def test_cli_shows_models_and_tokens() -> None:
    async with FakeRouter() as router:
        place = ("--address", router.address)
        assert "fake" in (await run("models", *place)).stdout
        [model] = json.loads((await run("models", "--json", *place)).stdout)
        assert (model["name"], model["max_model_len"]) == ("fake", 4096)
        ids = (await run("tokenize", "aé", *place)).stdout
        assert ids == "97 233\n"
        assert (await run("detokenize", *ids.split(), *place)).stdout == "aé\n"
        answer = await run("tokenize", "a", "--json", *place)
        assert json.loads(answer.stdout) == {"token_ids": [97], "max_model_len": 4096}
        answer = await run("detokenize", "97", "--json", *place)
        assert json.loads(answer.stdout) == {"text": "a"}
        assert "not in the model's vocabulary" in await failure("detokenize", "1114112", *place)


async def test_models_shows_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everlift.testing.router._MODEL", pb.Model(name="sql", parent="m"))
    async with FakeRouter() as router:
        place = ("--address", router.address)
        assert "sql (adapter of m)" in (await run("models", *place)).stdout


async def test_models_shows_sampling_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = pb.Sampling(temperature=0.6, top_k=20)
    served = pb.Model(name="m", max_model_len=64, vocab_size=512, sampling_defaults=defaults)
    monkeypatch.setattr("everlift.testing.router._MODEL", served)
    async with FakeRouter() as router:
        place = ("--address", router.address)
        assert "temperature 0.6, top_k 20" in (await run("models", *place)).stdout
        [model] = json.loads((await run("models", "--json", *place)).stdout)
    assert model["sampling_defaults"] == {"temperature": 0.6, "top_k": 20}


async def test_status_shows_the_cluster() -> None:
    async with FakeRouter() as router:
        await run("generate", "one", "--address", router.address)
        result = await run("status", "--address", router.address)
    assert result.exit_code == 0
    assert "completed 1" in result.stdout


async def test_cli_finds_the_cluster_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "everlift").mkdir()
    async with FakeRouter() as router:
        with endpoint.published(tmp_path / "everlift", [router.address]):
            assert (await run("generate", "one two")).stdout == "one two\n"


async def test_cli_prints_a_router_error_in_one_line() -> None:
    async with FakeRouter(faults=[Refuse(RequestConflict("r is [another]"))]) as router:
        place = ("--address", router.address)
        assert await failure("generate", "x", *place) == "r is [another]"
        assert "stop string is empty" in await failure("generate", "x", "--stop", "", *place)
        assert "request_id must be" in await failure("attach", "no id", *place)


@pytest.mark.parametrize(
    "command",
    [
        "generate x",
        "attach x",
        "cancel x",
        "forget x",
        "status",
        "status --watch",
        "chaos run --minutes 0",
    ],
)
async def test_cli_without_a_cluster_suggests_everlift_up(command: str) -> None:
    said = await failure(*command.split(), "--address", "127.0.0.1:1")
    assert (
        said == "no cluster answers at 127.0.0.1:1: start one with `everlift up`, or set --address"
    )


async def test_chaos_run_needs_a_key_with_its_scope() -> None:
    chaos = ("chaos", "run", "--minutes", "0")
    async with FakeRouter(api_key="ev_1_secret") as router:
        said = await failure(*chaos, "--address", router.address)
        assert said.endswith("commands use the key in EVERLIFT_API_KEY")
    # The command itself and its random faults call GetStatus first.
    refused = [Refuse(Forbidden("the key is for inference"), call="GetStatus")] * 2
    async with FakeRouter(faults=refused) as router:
        assert await failure(*chaos, "--address", router.address) == "the key is for inference"


async def test_cli_unknown_setting_suggests_the_nearest() -> None:
    said = await failure("up", "--set", "worker.max_num_seq=3")
    assert said == "worker.max_num_seq: unknown key; did you mean worker.max_num_seqs?"
    said = await failure("status", EVERLIFT_LEDGER__URI="x")
    assert said == "EVERLIFT_LEDGER__URI: unknown key; did you mean EVERLIFT_LEDGER__URL?"
    assert "No such file" in await failure("up", "--config", "nowhere.yaml")


@pytest.mark.parametrize("command", COMMANDS)
async def test_cli_help_shows_an_example(command: str) -> None:
    result = await run(command, "--help", COLUMNS="200")
    assert result.exit_code == 0
    assert f"everlift {command}" in result.stdout


def test_cli_help_replaces_unencodable_characters() -> None:
    command = [sys.executable, "-m", "cluster.cli", "attach", "--help"]
    environ = os.environ | {"PYTHONIOENCODING": "latin-1"}
    shown = subprocess.run(command, env=environ, check=True, capture_output=True).stdout
    assert b"everlift attach 3f2a?" in shown


def test_config_file_is_utf8_in_any_locale(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_bytes("state_dir: /srv/f\u00fcr_alle".encode())
    script = "import sys, cluster.config as c; print(ascii(c.load(c.Path(sys.argv[1]), {})))"
    # Python takes the C locale for UTF-8 unless both of its fallbacks are off.
    environ = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", script, str(file)]
    shown = subprocess.run(command, env=environ, check=True, capture_output=True).stdout
    assert rb"/srv/f\xfcr_alle" in shown


async def test_cli_help_lists_every_command() -> None:
    shown = (await run("--help")).stdout
    assert all(command in shown for command in COMMANDS)


async def test_cli_misspelt_command_suggests_the_nearest() -> None:
    result = await run("generat", "x")
    assert result.exit_code == 2
    assert "generate" in result.stderr


async def test_explain_takes_the_newest_request_or_a_prefix_of_an_id() -> None:
    async with FakeRouter() as router:
        place = ["--address", router.address]
        for request_id in ("chat-1", "chat-22", "other"):
            await run("generate", "x", "--request-id", request_id, *place)
        explained = [
            json.loads((await run("explain", *which, "--json", *place)).stdout)["request_id"]
            for which in (["--last"], ["o"], ["chat-2"], ["chat-1"])
        ]
        assert explained == ["other", "other", "chat-22", "chat-1"]
        assert await failure("explain", "chat", *place) == (
            "2 request ids begin with 'chat': chat-22, chat-1"
        )
        unknown = "no request id is or begins with 'none'"
        assert await failure("explain", "none", *place) == unknown
        neither = "give either a request id, --last or --session"
        assert await failure("explain", *place) == neither
        assert await failure("explain", "o", "--last", *place) == neither


async def test_requests_shows_whole_ids_in_a_narrow_terminal() -> None:
    request_id = "a-long-id-" * 9
    async with FakeRouter() as router:
        place = ["--address", router.address]
        await run("generate", "x", "--request-id", request_id, *place)
        listing = await run("requests", *place, COLUMNS="40")
    assert request_id in listing.stdout
    assert "…" not in listing.stdout
