"""Explanations as lines and tables for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from everlift.explanation import LABELS, state_name
from everlift.v1 import inference_pb2 as pb

#: Share of the whole time; all shorter spans are combined in one row.
_LEAST_PART = 1e-3
#: Share of the whole time above which unread output is shown. A short time is normal, because the
#: last tokens are unread until their client runs.
_MUCH_UNREAD = 0.05
_CONTINUED = {
    pb.CONTINUATION_EXACT: "interrupted, with the output of an uninterrupted run",
    pb.CONTINUATION_SAME_DISTRIBUTION: "interrupted, with an output from the same distribution as"
    " uninterrupted runs",
}


def of(explanation: pb.Explanation) -> list[str | Table]:
    """Return an explanation as lines and tables for a rich console, in the order of display."""
    return [
        *headline(explanation),
        *reading(explanation),
        spans(explanation),
        *([attempts(explanation)] if explanation.attempts else []),
        *neighbours(explanation),
        *queue_waits(explanation),
        *prefix_waits(explanation),
        *adapter_loads(explanation),
    ]


def headline(explanation: pb.Explanation) -> Iterator[str]:
    state, total_s = state_name(explanation.state), explanation.total_s
    yield f"[bold]{escape(explanation.request_id)}[/]: {state}, {total_s:.3f} s"
    tokens = f"{explanation.prompt_tokens} prompt tokens, {explanation.output_tokens} output tokens"
    if explanation.predicted_output_tokens:
        by_mean = " from the mean of recent outputs" if explanation.prediction_distrusted else ""
        tokens += f" ({explanation.predicted_output_tokens} predicted{by_mean})"
    yield tokens
    if explanation.HasField("ttft_s"):
        first = f"first token after {explanation.ttft_s:.3f} s"
        if explanation.HasField("predicted_ttft_s"):
            first += f" ({explanation.predicted_ttft_s:.3f} s predicted)"
        if explanation.HasField("ledger_s"):
            first += f", including {explanation.ledger_s:.3f} s to store it"
        yield first
    if explanation.continued:
        yield _CONTINUED[explanation.continued]
    if explanation.missing_workers:
        yield f"workers: {escape(explanation.missing_workers)}"


def reading(explanation: pb.Explanation) -> Iterator[str]:
    """Yield at most one line: how long tokens were unread by the client.

    The line is yielded if tokens are unread now, or if tokens were unread for more than 5 % of the
    request's time.
    """
    unread_s, unread = explanation.unread_s, explanation.unread_tokens
    if unread or unread_s > _MUCH_UNREAD * explanation.total_s:
        now = f"; {unread} unread now" if unread else ""
        yield f"tokens unread by the client for {unread_s:.3f} s{now}"


def spans(explanation: pb.Explanation) -> Table:
    """Return a table of the periods (spans) of the request, with their sum.

    Periods below 0.1 % of the whole time share one row.
    """
    table = Table("at, s", "seconds", "%", "what", "attempt", box=SIMPLE_HEAD, show_footer=True)
    for column in table.columns[:3]:
        column.justify = "right"
    total_s = explanation.total_s
    at = others_s = 0.0
    for span in explanation.spans:
        if span.seconds >= _LEAST_PART * total_s:
            attempt = str(span.attempt) if span.attempt else ""
            table.add_row(f"{at:.3f}", *_share(span.seconds, total_s), LABELS[span.kind], attempt)
        else:
            others_s += span.seconds
        at += span.seconds
    if others_s:
        table.add_row("", *_share(others_s, total_s), f"parts below {_LEAST_PART:.1%} each")
    table.columns[1].footer, table.columns[2].footer = _share(at, total_s)
    table.columns[3].footer = "total"
    return table


def _share(part_s: float, total_s: float) -> tuple[str, str]:
    return f"{part_s:.3f}", f"{100 * part_s / total_s:.1f}" if total_s else "0.0"


def attempts(explanation: pb.Explanation) -> Table:
    table = Table(
        "attempt", "worker", "known", "cached", "new", "preempted", "recomputed", "others", "end",
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    *numbers, end = table.columns
    for column in numbers:
        column.no_wrap = True
    end.overflow = "fold"
    for each in explanation.attempts:
        table.add_row(
            str(each.number),
            escape(each.worker_id[:8]),
            str(each.known_tokens),
            str(each.cached_tokens),
            str(each.new_tokens),
            str(each.preemptions),
            str(each.recomputed_tokens),
            # A worker that was lost early may have reported no steps.
            str(each.most_neighbours) if each.steps else "",
            escape(_state(each)),
        )
    return table


def _state(attempt: pb.ExplainedAttempt) -> str:
    """Return the cause of the attempt's end, or its progress if it has not ended."""
    if attempt.end or not attempt.prefilled_tokens:
        return attempt.end or "running"
    return f"in prefill: {attempt.prefilled_tokens} of {attempt.known_tokens} tokens"


def neighbours(explanation: pb.Explanation) -> Iterator[str]:
    """Yield lines that name other requests of the same tenant that shared or blocked capacity.

    Each attempt has up to three lines. The first one names requests that other workers had at the
    attempt's dispatch; it is left out if the request did not wait for capacity. The second one
    names requests that the attempt's worker had then. The third one names requests that this worker
    received during the attempt.
    """
    for attempt in explanation.attempts:
        number = attempt.number
        others = {
            f"at other workers without free capacity, attempt {number}": attempt.occupants,
            f"at the worker before attempt {number}": attempt.neighbours,
            f"arrived at the worker during attempt {number}": attempt.newcomers,
        }
        for where, names in others.items():
            if names:
                yield f"your requests {where}: {', '.join(map(escape, names))}"


def queue_waits(explanation: pb.Explanation) -> Iterator[str]:
    """Yield a line for each wait in the queue: how many other requests left it first, and why.

    A wait during which no other request left the queue has no line.
    """
    for attempt in explanation.attempts:
        reasons = ", ".join(_reasons(attempt.queue))
        if reasons:
            names = ", ".join(map(escape, attempt.queue.before))
            last = f"; your last ones: {names}" if names else ""
            yield (
                f"queue before attempt {attempt.number} ({attempt.queue.order}): "
                f"{attempt.queue.found} queued on arrival; left first: {reasons}{last}"
            )


def prefix_waits(explanation: pb.Explanation) -> Iterator[str]:
    """Yield a line for each wait for a worker that had a prefix of the request cached."""
    for attempt in explanation.attempts:
        if attempt.HasField("prefix_wait"):
            wait = attempt.prefix_wait
            missed = "" if attempt.expected_cached_tokens >= wait.tokens else " (in vain)"
            yield (
                f"cached prefix, attempt {attempt.number}: waited {wait.seconds:.3f} s{missed} for "
                f"a worker with {wait.tokens} of {attempt.known_tokens} tokens cached; computing "
                f"them elsewhere would have taken {wait.compute_s:.3f} s, and with its cost for "
                f"other requests, a wait of up to {wait.saved_s:.3f} s was worthwhile"
            )


def adapter_loads(explanation: pb.Explanation) -> Iterator[str]:
    """Yield a line for each wait at a worker until the request's LoRA adapter was loaded."""
    for attempt in explanation.attempts:
        if attempt.adapter_s:
            yield (
                f"adapter, attempt {attempt.number}: waited {attempt.adapter_s:.3f} s at the "
                "worker until it was loaded"
            )


def _reasons(queue: pb.QueueBypass) -> Iterator[str]:
    reasons = {
        "earlier arrivals": queue.earlier,
        "later arrivals of higher classes": queue.higher,
        "later arrivals by fair share": queue.fair_share,
        "later arrivals by the order": queue.ordered,
        "later arrivals of lower classes": queue.lower,
    }
    return (f"{count} {reason}" for reason, count in reasons.items() if count)
