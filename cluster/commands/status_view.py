"""A cluster's status as a table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from everlift.hashes import BLOCK_SIZE
from everlift.v1 import inference_pb2 as pb
from router.console.rates import Rates
from router.ledger.config import PROMISES


def show(status: pb.GetStatusResponse, rates: Rates | None = None, now: float = 0.0) -> Group:
    """Return the status of a cluster as tables and lines for the terminal.

    The tables show the models (if several are served), the workers and their engines. Lines with
    the adapters in memory and with the counters follow.

    Each worker's output tokens are shown as a total, or as tokens per second if ``rates`` is given.
    ``rates`` remembers the counts of earlier calls. ``now`` is the time of ``status``, in seconds
    of a clock that all calls use.
    """
    tokens = "tokens/s" if rates else "tokens"
    columns = ["worker", "address", "pid", "state", "running", "waiting", "KV blocks", tokens]
    has_models = len(status.models) > 1
    more = ["model"] if has_models else []
    table = Table(*columns, *more, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for worker in status.workers:
        names = [escape(worker.model)] if has_models else []
        table.add_row(*_cells(worker, _tokens(worker, rates, now)), *names)
    models = [_models(status)] if has_models else []
    return Group(*models, table, _engines(status), *_adapters(status), _counters(status))


def _models(status: pb.GetStatusResponse) -> Table:
    table = Table("model", "workers", "running", "queued", box=SIMPLE_HEAD, pad_edge=False)
    for model in status.models:
        table.add_row(escape(model.name), str(model.workers), str(model.running), str(model.queued))
    return table


def _adapters(status: pb.GetStatusResponse) -> Iterator[Text]:
    """Yield a line for each worker that has LoRA adapters in memory."""
    for worker in status.workers:
        if worker.alive and worker.loaded_adapters:
            names = ", ".join(worker.loaded_adapters)
            yield Text(f"adapters of {worker.worker_id[:8]}: {names}")


def _tokens(worker: pb.WorkerStatus, rates: Rates | None, now: float) -> str:
    if rates is None:
        return str(worker.output_tokens)
    return f"{rates.of(worker.worker_id, worker.output_tokens, now):.0f}"


def _cells(worker: pb.WorkerStatus, tokens: str) -> list[str]:
    cells = [escape(worker.worker_id[:8]), escape(worker.address), str(worker.pid), _state(worker)]
    if not worker.alive:
        return [*cells, "-", "-", "-", "-"]
    return [
        *cells,
        str(worker.num_running),
        str(worker.num_waiting),
        f"{worker.blocks_used} / {worker.blocks_total}",
        tokens,
    ]


def _engines(status: pb.GetStatusResponse) -> Table:
    """Return a table with the figures of the engine of each connected worker.

    ``budget`` is the maximum number of tokens in a step. ``KV empty`` is the present share of empty
    token positions in the used KV blocks.

    The other columns cover the time since the worker's start. ``busy`` is the used share of the
    batch slots, and ``hits`` the share of prompt tokens that were found in the prefix cache.
    ``drafts`` is the share of draft tokens that were accepted. ``preempted`` is the number of
    preemptions, and ``recomputed`` the number of recomputed tokens. ``swapped`` shows the numbers
    of KV blocks that were swapped out and in.
    """
    columns = ["worker", "budget", "busy", "hits", "drafts", "KV empty", "preempted"]
    table = Table(
        *columns, "recomputed", "swapped", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for worker in status.workers:
        if worker.alive:
            table.add_row(escape(worker.worker_id[:8]), *_engine_cells(worker))
    return table


def _engine_cells(worker: pb.WorkerStatus) -> list[str]:
    counters = worker.counters
    return [
        str(worker.max_num_batched_tokens),
        _share(counters.slot_steps, worker.step * worker.max_num_seqs),
        _share(counters.prefix_hit_tokens, counters.prompt_tokens),
        _share(counters.accepted_tokens, counters.draft_tokens),
        _share(counters.unfilled_tokens, worker.blocks_used * BLOCK_SIZE),
        str(worker.preemptions),
        str(counters.recomputed_tokens),
        f"{counters.blocks_swapped_out} / {counters.blocks_swapped_in}",
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _state(worker: pb.WorkerStatus) -> str:
    if not worker.alive:
        return "[red]lost[/]"
    if worker.draining:
        return "[yellow]draining[/]"
    return "[yellow]slow[/]" if worker.slow else "[green]up[/]"


def _counters(status: pb.GetStatusResponse) -> Text:
    missing = f"workers {status.missing_workers}\n" if status.missing_workers else ""
    model = "" if len(status.models) > 1 else f"model {status.model}   "
    return Text(
        f"{missing}"
        f"{model}leader {status.leader[:8] or 'none'}{_engine_policy(status)}\n"
        f"queue {status.queued}   running {status.running}   completed {status.completed}   "
        f"failed {status.failed}   migrated {status.migrated}   "
        f"output tokens {status.output_tokens}\n"
        f"preempted {status.preempted}   resumed elsewhere {status.moved}   "
        f"recomputed tokens {status.recomputed_tokens}   false alarms {status.false_alarms}\n"
        f"ledger {_ledger(status.ledger)}"
        f"{_http(status.http_address)}"
        f"{_metrics(status.metrics_address)}"
    )


def _engine_policy(status: pb.GetStatusResponse) -> str:
    policies = Counter(it.engine_policy for it in status.workers if it.alive and it.engine_policy)
    several = (f"{policy} ({workers})" for policy, workers in sorted(policies.items()))
    policy_text = ", ".join(several if len(policies) > 1 else policies)
    return f"   engine policy {policy_text}" if policy_text else ""


def _http(address: str) -> str:
    return f"\nOpenAI API of this router http://{address}/v1" if address else ""


def _metrics(address: str) -> str:
    return f"\nmetrics of this router http://{address}/metrics" if address else ""


def _ledger(ledger: pb.LedgerStatus) -> str:
    facts = [ledger.server, ledger.durability_class, ledger.durability]
    if ledger.memory_used:
        facts.append(f"memory {ledger.memory_used:.0%}")
    if ledger.rollbacks:
        facts.append(f"rollbacks {ledger.rollbacks}")
    if ledger.away:
        facts.append("not responding")
    facts_line = "   ".join(filter(None, facts))
    promise = PROMISES.get(ledger.durability_class)
    return f"{facts_line}\n{ledger.durability_class}: {promise}" if promise else facts_line
