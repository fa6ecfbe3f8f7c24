"""The status as a table."""

import re

from rich.console import Console, RenderableType

from cluster.commands.status_view import show
from everlift.v1 import inference_pb2 as pb
from router.console.rates import Rates


def text(renderable: RenderableType) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_status_shows_brackets_literally() -> None:
    workers = [pb.WorkerStatus(worker_id="[/home]", address="[fd00::1]:9", alive=True)]
    shown = text(show(pb.GetStatusResponse(workers=workers)))
    assert "[fd00::1]:9" in shown and shown.count("[/home]") == 2


def test_status_lists_loaded_adapters_by_worker() -> None:
    workers = [
        pb.WorkerStatus(worker_id="aaaabbbbcc", alive=True, loaded_adapters=["sql", "poems"]),
        pb.WorkerStatus(worker_id="ddddeeeeff", alive=True),
        pb.WorkerStatus(worker_id="gggghhhhii", loaded_adapters=["sql"]),
    ]
    shown = text(show(pb.GetStatusResponse(workers=workers)))
    assert re.findall("adapters of .*", shown) == ["adapters of aaaabbbb: sql, poems"]


STATUS = pb.GetStatusResponse(
    model="demo",
    leader="leader-of-all",
    queued=7,
    running=3,
    completed=11,
    migrated=2,
    output_tokens=500,
    workers=[
        pb.WorkerStatus(
            worker_id="aaaabbbbcccc",
            address="127.0.0.1:9",
            pid=42,
            alive=True,
            num_running=3,
            blocks_used=5,
            blocks_total=64,
            output_tokens=100,
            preemptions=4,
            step=100,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            counters=pb.EngineCounters(
                prompt_tokens=400,
                prefix_hit_tokens=300,
                recomputed_tokens=25,
                draft_tokens=50,
                accepted_tokens=41,
                slot_steps=200,
                blocks_swapped_out=7,
                blocks_swapped_in=6,
                unfilled_tokens=16,
            ),
        ),
        pb.WorkerStatus(worker_id="dead", alive=False, num_running=9),
        pb.WorkerStatus(worker_id="leaving", alive=True, draining=True),
    ],
    preempted=4,
    moved=3,
    recomputed_tokens=99,
    false_alarms=1,
    ledger=pb.LedgerStatus(
        server="valkey 9.1.2",
        durability_class="everysec",
        durability="before_delivery",
        memory_used=0.25,
    ),
)


def test_status_has_a_row_per_worker() -> None:
    rows = text(show(STATUS)).splitlines()[3:6]
    cells = [re.split(r"\s{2,}", row.strip()) for row in rows]
    assert cells[0] == ["aaaabbbb", "127.0.0.1:9", "42", "up", "3", "0", "5 / 64", "100"]
    assert cells[1][-5:] == ["lost", "-", "-", "-", "-"]
    assert cells[2][-5] == "draining"


def test_status_shows_engine_figures_of_connected_workers() -> None:
    rows = text(show(STATUS)).splitlines()[10:12]
    cells = [re.split(r"\s{2,}", row.strip()) for row in rows]
    assert cells[0] == ["aaaabbbb", "512", "25%", "75%", "82%", "10%", "4", "25", "7 / 6"]
    assert cells[1] == ["leaving", "0", "-", "-", "-", "-", "0", "0", "0 / 0"]


def test_status_shows_counters_below_the_table() -> None:
    shown = text(show(STATUS))
    assert "model demo   leader leader-o" in shown
    assert "queue 7   running 3   completed 11   failed 0   migrated 2" in shown
    assert "preempted 4   resumed elsewhere 3   recomputed tokens 99   false alarms 1" in shown
    assert "leader none" in text(show(pb.GetStatusResponse()))


def test_status_shows_the_ledger_with_its_troubles() -> None:
    shown = text(show(STATUS))
    assert "ledger valkey 9.1.2   everysec   before_delivery   memory 25%\n" in shown
    assert "everysec: writes survive a restart of the server, except the last second" in shown
    trouble = pb.LedgerStatus(server="valkey 9.1.2", rollbacks=2, away=True)
    shown = text(show(pb.GetStatusResponse(ledger=trouble)))
    assert "ledger valkey 9.1.2   rollbacks 2   not responding\n" in shown


def test_status_ends_with_the_metrics_address() -> None:
    status = pb.GetStatusResponse(metrics_address="127.0.0.1:9100")
    assert (
        text(show(status))
        .rstrip()
        .endswith("\nmetrics of this router http://127.0.0.1:9100/metrics")
    )
    assert "metrics" not in text(show(pb.GetStatusResponse()))


def test_status_shows_the_openai_api_address() -> None:
    shown = text(show(pb.GetStatusResponse(http_address="127.0.0.1:8000")))
    assert "\nOpenAI API of this router http://127.0.0.1:8000/v1" in shown
    assert "OpenAI" not in text(show(pb.GetStatusResponse()))


def test_status_shows_engine_policies_with_worker_counts() -> None:
    def line(*policies: str) -> str:
        workers = [pb.WorkerStatus(alive=True, engine_policy=policy) for policy in policies]
        lost = pb.WorkerStatus(engine_policy="magnus")
        status = pb.GetStatusResponse(model="demo", workers=[*workers, lost])
        return next(it for it in text(show(status)).splitlines() if "model demo" in it).strip()

    assert line("slai", "slai") == "model demo   leader none   engine policy slai"
    assert line("slai", "continuous", "slai").endswith("engine policy continuous (1), slai (2)")
    assert line("") == "model demo   leader none", "an older worker says nothing of it"


def test_status_marks_a_slow_worker() -> None:
    slow = pb.WorkerStatus(worker_id="w", alive=True, slow=True)
    assert " slow " in text(show(pb.GetStatusResponse(workers=[slow])))


def test_status_watch_shows_the_token_rate() -> None:
    rates = Rates()
    show(STATUS, rates, 0.0)
    later = pb.GetStatusResponse()
    later.CopyFrom(STATUS)
    later.workers[0].output_tokens = 350
    shown = text(show(later, rates, 2.0))
    assert "tokens/s" in shown
    assert " 125" in shown
