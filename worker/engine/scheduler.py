"""The scheduler: decides which tokens of which sequences the next step computes. Pure.

There is one rule: each step computes known tokens (of prompt and output so far) whose KV is not
computed yet, within a token budget. Chunked prefill, prefix hits, preemption, resumption,
continuation and speculation all follow from it.

    waiting  --admit-->    running    it gets a slot, and blocks for all its known tokens
    running  --preempt-->  waiting    its blocks are freed (they stay cached), and it keeps its
                                      place in the order of arrival; happens if blocks, or
                                      memory for a step, run short
    running  --commit-->   ended      it stopped, or needs more blocks than the pool has
    either   --remove-->   removed

Free blocks that sessions retain between turns are allocated before a sequence is preempted.

A policy (`policies/`) decides which sequence is admitted next and whose rows come first. A step
costs O(running), independent of the number of waiting sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several
from dataclasses import replace
from itertools import chain
from operator import attrgetter, neg

from everlift.engine_policy import EnginePolicy
from everlift.errors import EngineFailed, EverliftError
from everlift.hashes import BLOCK_SIZE
from worker.engine.batch import Batch
from worker.engine.blocks import ChunkChanges
from worker.engine.in_flight import InFlightStep
from worker.engine.limits import Limits, TokenBudget, blocks_for
from worker.engine.load import Counters, Load, Occupant
from worker.engine.outcome import Outcome, SequenceKey, Stop
from worker.engine.plan import Admission, Ints, Plan, Row, RowResult, Rows
from worker.engine.policies.choice import policy_of
from worker.engine.policies.policy import Waiting
from worker.engine.selection import BatchSelection, Selected
from worker.engine.sequence import NO_SLOT, Sequence
from worker.engine.speculation import MAX_READ, Drafter


class Scheduler:
    """Scheduler of an engine.

    A plan with rows must be committed, failed, retracted or launched before ``schedule``, ``add``,
    ``remove`` or ``set_policy`` is called next. A launched plan (``mark_launched``, then
    ``InFlightStep.launch``) must be ended by ``commit_in_flight`` or ``fail_in_flight`` before the
    next plan is ended. The same calls always make the same plans.
    """

    def __init__(self, limits: Limits, batch: Batch | None = None) -> None:
        self._limits = limits
        self._batch = Batch(limits) if batch is None else batch
        self._counters = Counters()
        self._policy = policy_of(limits.scheduling.policy, limits)
        self._selection = BatchSelection(self._batch, self._policy, self._counters)
        self._budget = TokenBudget(limits.max_num_batched_tokens)
        self._epochs: dict[int, list[Sequence]] = {}
        self._arrivals = 0
        self._step = 0
        self._output_tokens = 0
        self._preemptions = 0
        self._computed_tokens = 0
        self._kv_tokens = 0
        self._num_pairs = 0
        self._released_blocks = 0
        #: sequences preempted since the last call of ``take_preemption_outcomes``
        self._victims: dict[SequenceKey, Sequence] = {}
        #: slots that the current plan gave to newly admitted sequences
        self._newcomers: frozenset[int] = frozenset()
        #: number of tokens of the current plan
        self._num_planned = 0
        #: slots whose state in the runner is unknown after a failed step
        self._stale_slots: set[int] = set()

    # membership

    def __len__(self) -> int:
        return len(self._waiting) + len(self._batch)

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._epochs.values())

    def of_epoch(self, epoch: int) -> tuple[Sequence, ...]:
        """Return the sequences, running or waiting, of the attempt at a request with id ``epoch``.

        The tuple is empty if the attempt has no sequence here.
        """
        return tuple(self._epochs.get(epoch, ()))

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence as the last in the order of arrival."""
        sequence.order = self._arrivals
        self._arrivals += 1
        self._epochs.setdefault(sequence.key.epoch, []).append(sequence)
        self._waiting.push(sequence)

    def remove(self, sequence: Sequence, *, is_finished: bool = False) -> None:
        """Remove a sequence, running or waiting; its blocks are free at once.

        If its output is complete (``is_finished``), its session retains its cached blocks.
        """
        siblings = self._epochs[sequence.key.epoch]
        siblings.remove(sequence)
        if not siblings:
            del self._epochs[sequence.key.epoch]
        self._victims.pop(sequence.key, None)
        if sequence.slot == NO_SLOT:
            self._waiting.remove(sequence)
            self._batch.stop_swapping(sequence)
        else:
            self._released_blocks -= self._batch.num_blocks_free
            self._batch.remove(sequence, is_finished=is_finished)
            self._released_blocks += self._batch.num_blocks_free

    def set_policy(self, name: EnginePolicy) -> None:
        """Change the batching policy from the next step on.

        The batch stays as it is. The n waiting sequences are moved to the new policy's queue in the
        order of arrival, which takes O(n log n).
        """
        policy = policy_of(name, self._limits)
        for sequence in sorted(self._waiting, key=attrgetter("order")):
            policy.waiting.push(sequence)
        self._policy = self._selection.policy = policy

    @property
    def _waiting(self) -> Waiting:
        return self._policy.waiting

    def take_vacated(self) -> tuple[int, ...]:
        """Return the slots that became empty since the last call and are still empty."""
        return self._batch.take_vacated()

    @property
    def vacated(self) -> tuple[int, ...]:
        """Slots that became empty since the last ``take_vacated`` and are still empty."""
        return self._batch.vacated

    @property
    def newcomers(self) -> list[Sequence]:
        """Sequences that the last plan admitted to the batch."""
        return [self._batch[slot] for slot in self._newcomers]

    # one step

    def schedule(self, held_slots: Collection[int] = (), now: float = 0.0) -> Plan:
        """Return the plan of the step that begins at ``now``; it has no rows if nothing can run.

        ``held_slots`` are the batch slots whose grammar masks are not ready. No token is sampled in
        them, so that they delay no other sequence. If no other sequence can run, one of these slots
        is exempted.
        """
        self._step += 1
        self._batch.set_time(now)
        self._allocate_or_preempt()
        selected = self._selection.select(self._budget.tokens, held_slots, now)
        drafts = self._drafts(selected.decoding, self._budget.tokens - selected.num_tokens)
        rows = self._rows(selected, drafts)
        self._num_planned = rows.num_tokens
        admissions = self._admissions(rows, [chunk.sequence for chunk in selected.admitted])
        return Plan(self._step, rows, admissions, *self._batch.planned_copies())

    def commit(self, plan: Plan, results: Iterable[RowResult]) -> list[Outcome]:
        """Apply the results of ``plan``, one for each row, and return outcomes of sequences.

        The outcomes report new tokens, ends, and the preemptions since the last commit.
        """
        self._batch.commit_copies()
        return self._commit(plan, results)

    def _commit(self, plan: Plan, results: Iterable[RowResult]) -> list[Outcome]:
        self._count_step(plan)
        outcomes = self._commit_rows(plan.rows, results)
        return [*self.take_preemption_outcomes(), *outcomes]

    # steps that the device computes while the next one is planned

    def in_flight_step(self, plan: Plan) -> InFlightStep:
        """Return a new InFlightStep for ``plan``, the last plan, which is about to be launched."""
        return InFlightStep(plan, self._batch)

    def mark_launched(self) -> None:
        """Record that the last plan was launched, and that its block copies will thus be made."""
        self._batch.commit_copies()

    def must_commit_first(self) -> bool:
        """Return whether the step in flight must be committed before the next one is planned.

        True if the next plan would preempt a sequence: all tokens of a preempted sequence must be
        known when it is resumed, and the step in flight may still be sampling one.
        """
        return len(self._batch.slot_table.lacking()) > self._batch.num_blocks_free

    def commit_in_flight(self, flight: InFlightStep, results: Several[RowResult]) -> list[Outcome]:
        """Apply the results of a step in flight, one for each row, and return outcomes.

        Results of sequences that were removed since the launch are discarded.
        """
        for sequence, num_computed in flight.removed_failures(results):
            self._batch.invalidate_removed(sequence, num_computed)
        remaining = flight.remaining_results(results)
        plan = flight.commit()
        self._publish_filled(plan.rows)
        return self._commit(plan, remaining)

    def fail_in_flight(self, flight: InFlightStep, error: EverliftError) -> list[Outcome]:
        """End, with ``error``, the sequences of a failed step in flight; return their outcomes.

        Sequences that were removed since the launch are left out. The whole prefix cache is emptied
        in any case, because blocks that the step was to write may belong to other sequences by now.
        Preemptions that were not reported yet are reported too.
        """
        self._batch.invalidate_all()
        slots = flight.remaining_plan().rows.slots.tolist()
        return [
            *self.take_preemption_outcomes(),
            *(self._fail(self._batch[slot], error) for slot in slots),
        ]

    def _publish_filled(self, rows: Rows) -> None:
        filled = (rows.counts == 1) & (rows.known_ends % BLOCK_SIZE == 0)
        starts = rows.starts[filled].tolist()
        for sequence, start in zip(self._batch.at(rows.slots[filled]), starts, strict=True):
            self._batch.publish(sequence, start, start + 1)

    def _count_step(self, plan: Plan) -> None:
        self._budget.recover()
        self._computed_tokens += plan.num_tokens
        self._kv_tokens += plan.rows.kv_tokens
        self._num_pairs += plan.rows.num_pairs
        self._counters.slot_steps += len(plan.rows)
        self._counters.blocks_swapped_out += len(plan.saves)
        self._counters.blocks_swapped_in += len(plan.loads)

    def fail(self, plan: Plan, error: EverliftError) -> list[Outcome]:
        """End, with ``error``, all sequences of a plan whose step failed; return their outcomes."""
        self._batch.roll_back(plan)
        ended = [self._fail(self._batch[row.slot], error) for row in plan.rows]
        return [*self.take_preemption_outcomes(), *ended]

    def retract(self, plan: Plan, error: EverliftError) -> list[Outcome]:
        """Undo the last plan, whose step ran out of memory; return the outcomes of its sequences.

        Some sequences are preempted, and the next steps are smaller. A plan of a single token ends
        its sequence with ``error`` instead, because no smaller step exists. ``plan`` is the last
        plan, without the rows of sequences that were removed since.
        """
        self._batch.roll_back(plan)
        self._budget.shrink(self._num_planned)
        self._stale_slots.update(row.slot for row in plan.rows)
        if self._num_planned == 1:
            ended = [self._fail(self._batch[row.slot], error) for row in plan.rows]
            return [*self.take_preemption_outcomes(), *ended]
        for row in self._rows_to_preempt(plan):
            self.preempt(self._batch[row.slot])
        return self.take_preemption_outcomes()

    # preemption

    def _allocate_or_preempt(self) -> None:
        """Give every sequence in the batch the block that its last token needs.

        Sequences that have reached a length limit get none. Blocks that hold only draft tokens are
        freed first if too few blocks are free. Sequences are then preempted until enough blocks
        are free. The lowest priority is preempted first, and within a priority the sequence with
        the fewest computed tokens, which is the cheapest to recompute. The sequence with the most
        computed tokens among those of the highest priority is thus never preempted. If only one
        sequence is preempted, too few blocks are left free to admit it again in the same step.
        """
        growing = self._batch.slot_table.lacking()
        lacking = len(growing)
        if lacking > self._batch.num_blocks_free:
            self._batch.release_drafts()
            for victim in sorted(self._batch, key=_preemption_key):
                if lacking <= self._batch.num_blocks_free:
                    break
                lacking -= victim.num_blocks_lacking
                self.preempt(victim)
            growing = self._batch.slot_table.lacking()
        if len(growing):
            self._batch.allocate_one_each(growing)

    def preempt(self, victim: Sequence) -> None:
        self._batch.preempt(victim)
        victim.mark_preempted()
        self._waiting.push(victim)
        self._preemptions += 1
        self._victims[victim.key] = victim

    def _rows_to_preempt(self, plan: Plan) -> list[Row]:
        """Return the rows of the sequences to preempt after a step that ran out of memory.

        The rows of newly admitted sequences come first, because they may depend on blocks that the
        plan itself was to fill. The ``num_computed`` of newly admitted sequences is set to 0. The
        largest of the other rows follow, until the remaining rows have at most half of the plan's
        tokens, or only one row remains.
        """
        rows = [row for row in plan.rows if row.slot not in self._newcomers]
        rows.sort(
            key=lambda row: (len(row.tokens), *map(neg, _preemption_key(self._batch[row.slot])))
        )
        num_left = sum(len(row.tokens) for row in rows)
        to_preempt = [row for row in plan.rows if row.slot in self._newcomers]
        for row in to_preempt:
            self._batch[row.slot].num_computed = 0
        while len(rows) > 1 and num_left > self._num_planned // 2:
            to_preempt.append(rows.pop())
            num_left -= len(to_preempt[-1].tokens)
        return to_preempt

    # rows

    def _rows(self, selected: Selected, drafts: Mapping[int, tuple[int, ...]]) -> Rows:
        decoding, others = selected.decoding, [chunk.row() for chunk in selected.chunks]
        if drafts:
            sequences = self._batch.at(decoding)
            drafted = [sequence.row(1, drafts[sequence.slot]) for sequence in sequences]
            return self._batch.slot_table.rows(decoding[:0], [*drafted, *others])
        return self._batch.slot_table.rows(decoding, others)

    def _admissions(self, rows: Rows, newcomers: Iterable[Sequence]) -> tuple[Admission, ...]:
        """Return the admissions of a plan: those to repeat, then those of ``newcomers``.

        An admission is repeated for each sequence in ``rows`` whose slot state a failed step may
        have corrupted.
        """
        self._newcomers = frozenset(sequence.slot for sequence in newcomers)
        slots = [sequence.slot for sequence in newcomers]
        if self._stale_slots:
            stale = [slot for slot in rows.slots.tolist() if slot in self._stale_slots]
            slots = [*(slot for slot in stale if slot not in self._newcomers), *slots]
            self._stale_slots.difference_update(slots)
        return tuple(self._batch[slot].admission() for slot in slots)

    # drafts

    def _drafts(self, decoding: Ints, budget: int) -> dict[int, tuple[int, ...]]:
        drafts: dict[int, tuple[int, ...]] = {}
        if not self._limits.speculation.num_draft_tokens:
            return drafts
        most_read = MAX_READ
        for sequence in self._batch.at(decoding):
            drafter = self._drafter(sequence)
            most_read -= drafter.read(sequence.tokens, most_read)
            proposed = drafts[sequence.slot] = self._draft(sequence, drafter, budget)
            budget -= len(proposed)
        return drafts

    def _drafter(self, sequence: Sequence) -> Drafter:
        if sequence.drafter is None:
            sequence.drafter = Drafter(self._limits.speculation)
        return sequence.drafter

    def _draft(self, sequence: Sequence, drafter: Drafter, budget: int) -> tuple[int, ...]:
        """Return at most ``budget`` draft tokens, and allocate blocks for them.

        The blocks stay in the block table for later output, unless ``Batch.release_drafts`` frees
        them. Only free blocks are used: no sequence is preempted for drafts.
        """
        most = min(budget, self._max_drafts(sequence))
        if most <= 0:
            return ()
        drafts = drafter.propose(sequence.tokens, most)
        self._batch.allocate_blocks(sequence, sequence.num_known + len(drafts))
        return drafts

    def _max_drafts(self, sequence: Sequence) -> int:
        limits = self._limits
        blocks = len(sequence.block_table) + self._batch.num_blocks_free
        return min(
            sequence.max_tokens - sequence.num_output - 1,
            limits.max_model_len - sequence.num_known - 1,
            blocks * BLOCK_SIZE - sequence.num_known,
        )

    # results

    def _commit_rows(self, rows: Rows, results: Iterable[RowResult]) -> list[Outcome]:
        slot_table = self._batch.slot_table
        outcomes, rest = [], []
        is_plain = slot_table.is_plain_decode(rows)
        columns = zip(is_plain.tolist(), self._batch.at(rows.slots), results, strict=True)
        for i, (is_plain_row, sequence, result) in enumerate(columns):
            stops = sequence.stop_token_ids
            if is_plain_row and result.error is None and result.tokens[0] not in stops:
                outcomes.append(sequence.append_sampled(result))
            else:
                rest.append((i, sequence, result))
        is_plain[[i for i, *_ in rest]] = False
        slot_table.append_sampled(rows.slots[is_plain], [outcome.tokens[0] for outcome in outcomes])
        self._output_tokens += len(outcomes)
        others = (self._commit_row(sequence, rows[i], result) for i, sequence, result in rest)
        return [*outcomes, *(outcome for outcome in others if outcome is not None)]

    def _commit_row(self, sequence: Sequence, row: Row, result: RowResult) -> Outcome | None:
        if result.error is not None:
            self._batch.invalidate_row(sequence)
            return self._fail(sequence, result.error)
        offset = sequence.num_output
        stop, error = self._append(sequence, result.tokens)
        count = sequence.num_output - offset
        self._count_computed(sequence, row, count)
        if row.num_drafts:
            self._learn(sequence, row, result)
        scores = sequence.score(row, result.prompt_logprobs) if row.scores_prompt else (0, ())
        num_computed = sequence.most_computed
        if stop is not None:
            self.remove(sequence, is_finished=error is None)
        else:
            self._batch.slot_table.write(sequence)
        if not count and not scores[1] and sequence.pending_update.residence is None:
            return None
        fields = result.tokens[:count], stop, error, result.logprobs[:count]
        return Outcome(sequence.key, offset, *fields, *scores, num_computed, sequence.take_update())

    def _append(
        self, sequence: Sequence, tokens: Iterable[int]
    ) -> tuple[Stop | None, EverliftError | None]:
        for token in tokens:
            sequence.tokens.append(token)
            self._output_tokens += 1
            if (stop := sequence.stop(self._limits)) is not None:
                return stop, None
        return self._check_outgrown(sequence)

    def _check_outgrown(self, sequence: Sequence) -> tuple[Stop | None, EverliftError | None]:
        if blocks_for(sequence.num_known) > self._limits.num_blocks:
            blocks = self._limits.num_blocks
            return Stop.FAILED, EngineFailed(
                f"the sequence outgrew the worker's KV cache of {blocks} blocks"
            )
        return None, None

    def _learn(self, sequence: Sequence, row: Row, result: RowResult) -> None:
        accepted = len(result.tokens) - 1
        self._counters.draft_tokens += row.num_drafts
        self._counters.accepted_tokens += accepted
        assert sequence.drafter is not None, "the sequence has no drafter"
        sequence.drafter.learn(row.num_drafts, accepted)

    def _count_computed(self, sequence: Sequence, row: Row, num_sampled: int) -> None:
        sequence.num_computed = row.known_end
        if num_sampled > 1:
            sequence.num_computed += num_sampled - 1
            self._batch.publish(sequence, row.known_end, sequence.num_computed)
        if row.start < sequence.num_computed_before:
            end = min(sequence.num_computed, sequence.num_computed_before)
            self._counters.recomputed_tokens += end - row.start
            sequence.count_recomputed(end - row.start)

    def _fail(self, sequence: Sequence, error: EverliftError) -> Outcome:
        outcome = sequence.outcome(Stop.FAILED, error)
        self.remove(sequence)
        return outcome

    # reports

    def take_preemption_outcomes(self) -> list[Outcome]:
        """Return an outcome, without tokens, for each sequence that was preempted and still waits.

        Only preemptions since the last call are reported.
        """
        victims = list(self._victims.values())
        self._victims.clear()
        return [victim.outcome() for victim in victims if victim.is_preempted]

    def load(self) -> Load:
        running, slot_table = self._batch, self._batch.slot_table
        num_prefilling = slot_table.num_prefilling
        return Load(
            num_running=len(running),
            num_waiting=len(self._waiting),
            blocks_used=running.num_blocks_used,
            blocks_total=self._limits.num_blocks,
            pending_prefill_tokens=num_prefilling + self._waiting.num_uncached,
            committed_tokens=slot_table.num_known + self._waiting.num_tokens,
            step=self._step,
            output_tokens=self._output_tokens,
            preemptions=self._preemptions,
            counters=replace(self._counters, unfilled_tokens=slot_table.num_unfilled),
            computed_tokens=self._computed_tokens,
            kv_tokens=self._kv_tokens,
            num_pairs=self._num_pairs,
            released_blocks=self._released_blocks,
            blocks_cached=running.num_blocks_cached,
            blocks_retained=running.num_blocks_retained,
            waiting_cached_tokens=self._waiting.num_tokens - self._waiting.num_uncached,
            long_prefill_tokens=self._long_prefill_tokens(num_prefilling),
        )

    def _long_prefill_tokens(self, num_prefilling: int) -> int:
        most = self._limits.max_num_batched_tokens
        if not self._policy.has_short_first or num_prefilling <= most:
            return 0
        long = self._batch.at(self._batch.slot_table.prefilling(above=most))
        # Resumed sequences come first, so that no prompt passes them.
        return sum(sequence.remaining for sequence in long if not sequence.num_output)

    def take_chunk_changes(self) -> ChunkChanges:
        """Return the changes of the prefix cache since the last call. Call between steps."""
        return self._batch.take_chunk_changes()

    def occupants(self) -> tuple[Occupant, ...]:
        """Return the occupants of the batch slots, in the order of the slots."""
        running = sorted(self._batch, key=lambda s: s.slot)
        return tuple(Occupant(s.slot, s.request_id, s.remaining > 1) for s in running)

    def prefilling(self) -> list[Sequence]:
        """Return the sequences in the batch that have several tokens left to compute."""
        return list(self._batch.at(self._batch.slot_table.prefilling()))

    def check_integrity(self) -> None:
        """Check invariants; raise AssertionError if one is violated. O(blocks and sequences)."""
        waiting = list(self._waiting)
        self._batch.check_integrity(preempted=waiting)
        assert {*waiting, *self._batch} == {*self}, "a sequence neither waits nor runs"
        assert sum(s.num_known for s in waiting) == self._waiting.num_tokens, "waiting tokens"
        assert sum(s.num_uncached for s in waiting) == self._waiting.num_uncached, "uncached tokens"
        for sequence in waiting:
            assert not sequence.block_table and sequence.slot == NO_SLOT, "waits with blocks"
            assert not sequence.num_computed, "waits with something computed"
        assert self._victims.keys() <= {s.key for s in waiting if s.is_preempted}, "victims"


def _preemption_key(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.priority, sequence.num_computed, -sequence.order
