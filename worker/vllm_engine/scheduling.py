"""Scheduler of vLLM that continues sequences which have output already.

A sequence is queued with its output so far, as vLLM itself queues a preempted one. Grammars are
advanced over that output once they are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from worker.vllm_engine.params import KNOWN

_GRAMMAR_PENDING = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def known_tokens(params: Any) -> list[int]:
    """Return the output tokens that a request had when it was queued, or [] if it had none.

    ``params`` is the request's sampling parameters in vLLM, whose ``extra_args`` carry these
    tokens. None stands for parameters without such tokens.
    """
    arguments = params.extra_args if params is not None else None
    return list((arguments or {}).get(KNOWN) or [])


class ContinuingScheduler(Scheduler):
    """Scheduler that lets sequences continue after the output they already have.

    Steps do not overlap: each is planned after the previous one has ended.
    """

    #: called with each planned step that computes something, and the requests preempted before it
    on_scheduled: Callable[[SchedulerOutput, Sequence[str]], None] | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._preempted: list[str] = []

    def add_request(self, request: Request) -> None:
        if tokens := known_tokens(request.sampling_params):
            request.append_output_token_ids(tokens)
            # The statistics assume that no cached prefix is longer than the prompt.
            request.prefill_stats = None
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        was_pending = request.status == _GRAMMAR_PENDING
        may_run = super()._handle_blocked_waiting_request(request)
        tokens = known_tokens(request.sampling_params)
        if may_run and was_pending and tokens:
            manager = self.structured_output_manager
            if not manager.accept_tokens(request, tokens):
                self.grammar_compile_error_reqs.add(request.request_id)
                request.status = _GRAMMAR_PENDING
                return False
        return may_run

    def _preempt_request(self, request: Request, *arguments: Any, **named: Any) -> None:
        self._preempted.append(request.request_id)
        super()._preempt_request(request, *arguments, **named)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        if self.on_scheduled is not None and output.total_num_scheduled_tokens:
            preempted, self._preempted = self._preempted, []
            self.on_scheduled(output, preempted)
        return output
