"""Forecasts on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.simulator.command.policies import routers
from tests.support.commands import run

#: Step times of a worker with 20 tokens per second and row, and 1,000 prompt tokens per second.
STEP_TIME = {"overhead_s": 0.0, "weights_s": 0.05, "token_s": 1e-3, "kv_token_s": 0.0}
WORKER = {
    "num_blocks": 400,
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
}
#: One request per second, of 200 prompt tokens and 20 output tokens.
TRACE = [
    {"timestamp": 1000 * i, "input_length": 200, "output_length": 20, "hash_ids": []}
    for i in range(20)
]


@pytest.fixture
def kind(tmp_path: Path) -> str:
    file = tmp_path / "slow.json"
    file.write_text(json.dumps({"step_time": STEP_TIME, "worker": WORKER}))
    return str(file)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in TRACE))
    return str(file)


async def test_simulate_prints_writes_and_draws_a_forecast(
    tmp_path: Path, kind: str, trace: str
) -> None:
    to_json, pictures = tmp_path / "answer.json", tmp_path / "pictures"
    files = ("--json", str(to_json), "--pictures", str(pictures))
    said = await run("simulate", "--workers", f"{kind}=1", "--trace", trace, *files)
    answer = json.loads(to_json.read_text())
    assert (answer["all"]["requests"], answer["all"]["finished"]) == (20, 20)
    assert answer["all"]["ttft_s"]["p50"] == pytest.approx(0.2, abs=0.1)
    assert answer["all"]["tpot_s"]["p50"] == pytest.approx(0.05, rel=0.2)
    assert "100.0%" in said and "requests finished" in said
    assert len(list(pictures.glob("*.png"))) == 3


async def test_simulate_loses_and_adds_workers(tmp_path: Path, kind: str, trace: str) -> None:
    to_json = tmp_path / "answer.json"
    options = ("--lose", "0@5", "--add", "1@6", "--start-time", "2", "--json", str(to_json))
    said = await run("simulate", "--workers", f"{kind}=2", "--trace", trace, *options)
    answer = json.loads(to_json.read_text())
    assert "too late" not in said
    assert {sample["workers"] for sample in answer["samples"]} == {1, 2}
    assert answer["all"]["finished"] == 20


async def test_simulate_reports_events_after_the_last_request(kind: str, trace: str) -> None:
    late = ("--lose", "0@600", "--lose", "1@5")
    said = await run("simulate", "--workers", f"{kind}=2", "--trace", trace, *late)
    assert "1 events were due only after all requests had ended, at 2" in said


async def test_simulate_applies_router_and_worker_settings(
    tmp_path: Path, kind: str, trace: str
) -> None:
    to_json = tmp_path / "answer.json"
    options = ("--speed", "20", "--set", "router.max_queued=1", "--set", "worker.max_num_seqs=1")
    where = ("--json", str(to_json))
    await run("simulate", "--workers", f"{kind}=1", "--trace", trace, *options, *where)
    assert json.loads(to_json.read_text())["all"]["refused"]["queue_full"] > 5


async def test_simulate_synthetic_workload_shows_groups_on_request() -> None:
    how = ("--workload", "chat", "--duration", "2", "--foresight", "0.5")
    said = await run("simulate", "--workers", "h200=1", *how)
    assert "class 1" not in said and "tenant t1" not in said
    said = await run("simulate", "--workers", "h200=1", *how, "--groups")
    assert "class 1" in said and "tenant t1" in said


async def test_simulate_foresight_has_an_upper_limit(kind: str, trace: str) -> None:
    where = ("simulate", "--workers", f"{kind}=1", "--trace", trace, "--foresight")
    assert "100.0%" in await run(*where, "10")
    assert "--foresight" in await run(*where, "500", status=2)


async def test_plan_command_finds_the_fewest_sufficient_workers(
    tmp_path: Path, kind: str, trace: str
) -> None:
    """Sixteen times the rate of the trace needs more than one worker."""
    to_json, picture = tmp_path / "plan.json", tmp_path / "drawn" / "plan.png"
    files = ("--json", str(to_json), "--picture", str(picture))
    load = ("--trace", trace, "--speed", "16", "--kind", kind)
    said = await run("plan", "--slo", "ttft_p99=1s,latency_p50=5s", *load, *files)
    plan = json.loads(to_json.read_text())["kinds"]["slow"]
    enough = {trial["workers"]: trial["is_enough"] for trial in plan["trials"]}
    assert plan["workers"] > 1
    assert enough[plan["workers"]] and not enough[plan["workers"] - 1]
    assert f"slow: {plan['workers']} workers are enough" in said
    assert picture.exists()


async def test_plan_command_reports_an_unreachable_target(kind: str, trace: str) -> None:
    load = ("--trace", trace, "--kind", kind, "--most", "4")
    said = await run("plan", "--slo", "tpot_mean=20ms", *load, status=1)
    assert "slow: 4 workers are not enough: tpot_mean is" in said
    assert "more workers would not change that" in said


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("simulate", "--workers", "b200=1"), "b200: must be one of h100"),
        (("simulate", "--trace", "nowhere.csv"), "nowhere.csv: No such file"),
        (("simulate", "--set", "router.ordr=hrrn"), "did you mean router.order?"),
        (("simulate", "--slo", "ttft=1"), "must be a duration"),
        (("simulate", "--from-ledger", "--trace", "some.csv"), "exclude each other"),
        (("simulate", "--from-ledger", "--load", "0.9"), "do not apply to recorded requests"),
        (("simulate", "--from-ledger", "--set", "state_dir=/nowhere"), "/nowhere has no ledger"),
        (
            ("plan", "--slo", "ttft_p99=1s", "--from-ledger", "--rate", "2"),
            "do not apply to recorded",
        ),
        (("plan", "--slo", "ttft_p99=1s", "--from-ledger", "--speed", "2"), "need --trace"),
        (("plan", "--slo", "ttft=1s"), "must be ttft, tpot or latency"),
        (("plan", "--slo", "ttft_p99=1s, ttft_p99=2s"), "ttft_p99 is given twice"),
        (("simulate", "--slo", "ttft=1s,ttft=2s"), "ttft is given twice"),
        (("plan", "--slo", "ttft_p99=1s", "--picture", "plan.xyz"), "must end with one of .png"),
        (
            ("plan", "--slo", "ttft_p99=1s", "--kind", "l4", "--kind", "l4"),
            "two kinds have the name l4",
        ),
    ],
)
async def test_forecast_commands_report_invalid_input_in_one_line(
    arguments: tuple[str, ...], said: str
) -> None:
    output = await run(*arguments, status=1)
    assert said in output and output.startswith("error: ")


async def test_replay_runs_a_trace_under_each_policy(tmp_path: Path, kind: str, trace: str) -> None:
    to_json = tmp_path / "answer.json"
    policies = ("--policy", "fifo,shortest", "--policy", "fifo router.local_depth=4")
    where = ("--trace", trace, "--workers", f"{kind}=1", "--json", str(to_json))
    said = await run("replay", *policies, *where)
    answers = json.loads(to_json.read_text())
    assert list(answers) == ["fifo", "shortest", "fifo router.local_depth=4"]
    assert {answer["all"]["finished"] for answer in answers.values()} == {20}
    assert "shortest" in said and "100.0%" in said


def test_replay_policies_accept_names_of_papers() -> None:
    named = routers(["hrrn,ltr,vtc"], None, ["router.fair_share=false"])
    assert list(named) == ["hrrn", "ltr", "vtc"]
    assert [router.order for router in named.values()] == ["hrrn", "ranked", "fifo"]
    assert [router.fair_share for router in named.values()] == [False, False, True]


def test_replay_policy_settings_accept_short_and_full_names() -> None:
    named = routers(["shortest ageing_factor=3,shortest router.ageing_factor=3"], None, None)
    assert [router.ageing_factor for router in named.values()] == [3.0, 3.0]


async def test_replay_names_identical_policies(kind: str, trace: str) -> None:
    where = ("--trace", trace, "--workers", f"{kind}=1")
    said = await run("replay", "--policy", "fifo,hrrn,vtc", *where)
    assert "fifo and vtc are the same policy" in said
    assert "same" not in await run("replay", "--policy", "fifo fair_share=false,vtc", *where)


async def test_replay_rejects_missing_requests_and_unknown_policies(trace: str) -> None:
    assert "give either --from-ledger or --trace" in await run("replay", status=1)
    assert "must be one of fifo" in await run(
        "replay", "--trace", trace, "--policy", "best", status=1
    )
    assert "only router settings" in await run(
        "replay", "--trace", trace, "--policy", "fifo worker.max_num_seqs=1", status=1
    )
    assert "need --trace" in await run("replay", "--from-ledger", "--speed", "2", status=1)


async def test_measure_rejects_invalid_arguments(tmp_path: Path) -> None:
    assert "must end with .json" in await run("measure", "here", status=1)
    file = str(tmp_path / "here.json")
    assert "worker.fake sets its step times" in await run(
        "measure", file, "--model", "fake", status=1
    )
    said = await run("measure", file, "--running", "--model", "fake", status=1)
    assert "--running excludes --model" in said
    said = await run("measure", file, "--set", "worker.tensor_parallel=2", status=1)
    assert "one rank" in said
    assert not (tmp_path / "here.json").exists()
