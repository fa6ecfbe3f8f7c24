"""Values that scheduler and runner exchange for one engine step. Pure.

All of them are immutable:

    Plan  ->  KV blocks to save and load; admissions to slots; rows to compute
          <-  a RowResult for each row
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from everlift.errors import EverliftError
from everlift.hashes import BLOCK_SIZE
from everlift.sampling import SamplingParams, TokenLogprobs
from worker.device.device_kind import DeviceKind
from worker.engine.adapter_slots import AdapterSlots
from worker.engine.limits import blocks_for

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Stands for a token that the previous step, which is still in flight, samples in the same slot.
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Admission:
    """Sequence that occupies batch slot ``slot`` from this step on, in place of any other.

    ``tokens`` are its prompt, of ``num_prompt`` tokens, and its output so far. ``choice`` is the
    index of the choice within its request. ``adapter`` is the digest of the LoRA adapter with which
    it is computed (empty: none). ``grammar`` is the compiled ``sampling.grammar`` on rank 0; it is
    None on other ranks, which sample nothing, and if there is no grammar.
    """

    slot: int
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    choice: int
    grammar: object | None = None
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Part of one sequence in a step: ``tokens`` to compute, the first of them at ``start``.

    The tokens are known tokens (prompt and output so far), and possibly drafts after them. The KV
    of position p is written to block ``block_table[p // BLOCK_SIZE]``; the table may be longer than
    needed. The KV of all positions before ``start`` is in the cache already, or is computed by an
    earlier row of the same step.

        tokens   |---- known ----|-- drafts --|
                 start                        start + len(tokens)

    If ``samples``, the row computes the sequence's last known token. The next token is sampled, and
    if it equals the first draft, the one after it as well, and so on. If ``scores_prompt``, the
    result must have the log probabilities of the prompt's tokens at positions ``start + 1`` to
    ``start + len(tokens)``.
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: bool
    num_drafts: int = 0
    scores_prompt: bool = False

    @property
    def known_end(self) -> int:
        """Position after the known tokens."""
        return self.start + len(self.tokens) - self.num_drafts


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a step, stored as columns, so that a decode step creates no object per row.

    There are n rows with T tokens in total. ``tokens`` [T] has the tokens of the first row, then
    those of the second, and so on. The columns [n] have one element per row: ``counts`` is the
    number of its tokens, at least one. ``slots``, ``starts``, ``num_drafts``, ``samples`` and
    ``scores_prompt`` are the fields of Row. Iteration and indexing create Row objects. The token of
    a row that decodes may be UNKNOWN, a placeholder for the token that the previous step, still in
    flight, samples in the same slot.

    ``tables`` int32 [slots, width] are block tables by slot: the block of position p of row i is
    ``tables[slots[i], p // BLOCK_SIZE]``. Entries beyond a row's last token have no meaning. The
    array is the scheduler's own and is valid until the next step is planned.
    """

    slots: Ints
    starts: Ints
    counts: Ints
    num_drafts: Ints
    samples: Flags
    scores_prompt: Flags
    #: [T]
    tokens: Ints
    tables: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Iterable[Row], tables: NDArray[np.int32] | None = None) -> Self:
        """Return ``rows`` as columns.

        ``tables`` becomes the field of that name; the block tables of ``rows`` are then ignored.
        A new array is filled from the block tables of ``rows`` if ``tables`` is None. Rows of the
        same slot must then have equal block tables.
        """
        rows = tuple(rows)
        return cls(
            slots=_ints([row.slot for row in rows]),
            starts=_ints([row.start for row in rows]),
            counts=_ints([len(row.tokens) for row in rows]),
            num_drafts=_ints([row.num_drafts for row in rows]),
            samples=np.array([row.samples for row in rows], np.bool_),
            scores_prompt=np.array([row.scores_prompt for row in rows], np.bool_),
            tokens=_ints([*chain.from_iterable(row.tokens for row in rows)]),
            tables=_tables(rows) if tables is None else tables,
        )

    @classmethod
    def decoding(cls, slots: Ints, starts: Ints, tokens: Ints, tables: NDArray[np.int32]) -> Self:
        """Return rows that compute one known token each and sample the next one.

        Row i computes ``tokens[i]`` of slot ``slots[i]`` at position ``starts[i]``.
        """
        zeros, ones = np.zeros_like(slots), np.ones_like(slots)
        return cls(slots, starts, ones, zeros, ones > 0, zeros > 0, tokens, tables)

    def concat(self, others: Rows) -> Rows:
        """Return these rows followed by ``others``, whose ``tables`` must be the same array."""
        assert others.tables is self.tables
        return Rows(
            slots=np.concatenate((self.slots, others.slots)),
            starts=np.concatenate((self.starts, others.starts)),
            counts=np.concatenate((self.counts, others.counts)),
            num_drafts=np.concatenate((self.num_drafts, others.num_drafts)),
            samples=np.concatenate((self.samples, others.samples)),
            scores_prompt=np.concatenate((self.scores_prompt, others.scores_prompt)),
            tokens=np.concatenate((self.tokens, others.tokens)),
            tables=self.tables,
        )

    def select(self, chosen: Flags) -> Rows:
        """Return the rows for which ``chosen`` [n] is true."""
        return Rows(
            slots=self.slots[chosen],
            starts=self.starts[chosen],
            counts=self.counts[chosen],
            num_drafts=self.num_drafts[chosen],
            samples=self.samples[chosen],
            scores_prompt=self.scores_prompt[chosen],
            tokens=self.tokens[np.repeat(chosen, self.counts)],
            tables=self.tables,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV the rows read, including the tokens that they compute."""
        return int(self.starts.sum()) + self.num_tokens

    @cached_property
    def num_pairs(self) -> int:
        """Number of pairs of a computed token and a token that it attends to.

        The i-th token of a row, counted from 1, attends to ``start + i`` tokens, including itself.
        """
        if len(self) == self.num_tokens:
            return self.kv_tokens
        triangles = (int(self.counts @ self.counts) + self.num_tokens) // 2
        return int(self.counts @ self.starts) + triangles

    @cached_property
    def firsts(self) -> Ints:
        """Index in ``tokens`` of each row's first token, [n]."""
        return self.counts.cumsum() - self.counts

    @cached_property
    def positions(self) -> Ints:
        """Position of each token in its sequence, [T]."""
        if len(self) == self.num_tokens:
            return self.starts
        return np.arange(self.num_tokens) + self.spread(self.starts - self.firsts)

    @cached_property
    def blocks(self) -> NDArray[np.int32]:
        """Id of the block that each token's KV is written to, [T]."""
        return self.tables[self.spread(self.slots), self.positions // BLOCK_SIZE]

    @cached_property
    def known_ends(self) -> Ints:
        """Position after each row's known tokens, [n]."""
        return self.starts + self.counts - self.num_drafts

    def drafts(self, index: int) -> tuple[int, ...]:
        """Return the draft tokens of row ``index``; an empty tuple if it has none."""
        end = int(self.firsts[index] + self.counts[index])
        return tuple(self.tokens[end - int(self.num_drafts[index]) : end].tolist())

    def spread(self, column: Ints) -> Ints:
        """Return for each token the value of ``column`` [n] for its row, [T]."""
        return column if len(self) == self.num_tokens else np.repeat(column, self.counts)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Row:
        slot, start, count = (int(c[index]) for c in (self.slots, self.starts, self.counts))
        first = int(self.firsts[index])
        return Row(
            slot=slot,
            tokens=tuple(self.tokens[first : first + count].tolist()),
            start=start,
            block_table=tuple(self.tables[slot, : blocks_for(start + count)].tolist()),
            samples=bool(self.samples[index]),
            num_drafts=int(self.num_drafts[index]),
            scores_prompt=bool(self.scores_prompt[index]),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and [*self] == [*other]


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)


def _tables(rows: Sequence[Row]) -> NDArray[np.int32]:
    width = max((len(row.block_table) for row in rows), default=0)
    tables = np.zeros((max((row.slot + 1 for row in rows), default=0), width), np.int32)
    for row in rows:
        tables[row.slot, : len(row.block_table)] = row.block_table
    return tables


NO_ROWS = Rows.of(())


class BlockCopy(NamedTuple):
    """Copy between ``block`` of the KV cache and ``host_block`` of host memory; both are ids."""

    block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one step; ``step`` counts from 1.

    Rows that decode come first. Rows of newly admitted sequences come last, in the order of
    ``admissions``, and may attend to KV that earlier rows of the step write. ``admissions`` begins
    with repeated admissions of running sequences, if a failed step may have corrupted the state of
    their slots. ``saves`` copy blocks to host memory, ``loads`` copy blocks from it. All saves are
    executed before all loads, and both before the rows.
    """

    step: int
    rows: Rows
    admissions: tuple[Admission, ...] = ()
    saves: tuple[BlockCopy, ...] = ()
    loads: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.rows.num_tokens


class RowResult(NamedTuple):
    """Result of a row.

    ``tokens`` are the sampled tokens: none if the row does not sample, otherwise one, and one more
    for each accepted draft. On rank 0 ``logprobs`` has their log probabilities and
    ``prompt_logprobs`` those of the prompt's tokens, if requested; both are empty otherwise. If
    there is an ``error``, no token was sampled, and the sequence cannot continue.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: EverliftError | None = None


#: Result of a row that does not sample.
NOTHING_SAMPLED = RowResult()


class LaunchedStep(Protocol):
    """Step that was submitted to the device, which may still be computing it."""

    def sample(self) -> None:
        """Start to sample the tokens of the rows.

        Call only after ``results`` of the previous launched step, if any, has returned.
        Raises OutOfMemory, DeviceLost, or another exception if the step fails; the step's block
        copies are made even then.
        """
        ...

    def results(self) -> list[RowResult]:
        """Wait for the sampled tokens, and return a result for each row.

        Raises OutOfMemory on all ranks, a plain MemoryError on this rank alone, DeviceLost, or
        another exception if the step fails.
        """
        ...


#: Function that launches a step; tokens of its plan that the previous step samples may be UNKNOWN.
#: Raises what Runner.execute raises.
Launch = Callable[[Plan], LaunchedStep]


class OutOfMemory(MemoryError):
    """Raised if a rank has too little memory for a step.

    All ranks then raise it, at the same point of the step.
    """


class DeviceLost(Exception):
    """Raised if the device refuses all further work; ``__cause__`` is the device's error."""


class Runner(Protocol):
    """Executor of plans; each rank has one."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the rank's KV cache."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Number of blocks of the host memory for swapping; 0 if blocks are not swapped."""
        ...

    @property
    def host_load_s(self) -> float:
        """Seconds to load a block from host memory; 0 if blocks are not swapped."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a sequence, prompt and output together."""
        ...

    @property
    def device_kind(self) -> DeviceKind:
        """Kind of the device on which the runner computes."""
        ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Digests of the files of the LoRA adapters of the setting ``adapters``, by name."""
        ...

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        """Slots for LoRA adapters; None if there are none.

        An admission may name an adapter, by its digest, only while the adapter is in a slot.
        """
        ...

    def unready_slots(self) -> frozenset[int]:
        """Return the batch slots in which sampling now would have to wait for a grammar's mask.

        A mask tells which tokens the grammar allows next. The result is always empty on ranks above
        0, which sample nothing.
        """
        ...

    @property
    def launch(self) -> Launch | None:
        """Function that starts a step without waiting for its results; None if that saves no time.

        Steps with draft tokens must be run with ``execute``.
        """
        ...

    def execute(self, plan: Plan) -> list[RowResult]:
        """Run one step and return a result for each row, with the same tokens on every rank.

        Raises OutOfMemory on all ranks if one has too little memory for a step of this size.
        The KV that the step was to write may then be written in part, and the runner's state of the
        step's slots may be incomplete. Raises DeviceLost, or another exception if the step fails.
        """
        ...

    def release(self, slots: Collection[int]) -> None:
        """Release the state that the runner keeps for these batch slots, which are now empty."""
        ...

    def close(self) -> None: ...


def plan_digest(plan: Plan, committed: Iterable[RowResult] = ()) -> bytes:
    """Return a digest of a plan and of the sampled tokens in ``committed``.

    Ranks compare digests to detect that their plans or tokens differ. ``committed`` are the results
    that the same call of ``Engine.step`` committed. The digest covers the step number, the block
    copies, and each row's slot, start, tokens and blocks. Admissions are left out, because all
    ranks get their content from the same log.

    Blocks that lie wholly before a row are included only when its sequence is admitted: in later
    steps they have not changed since an earlier digest, and there may be thousands.
    """
    rows = plan.rows
    counts = (plan.step, len(rows), len(plan.saves), len(plan.loads))
    digest = hashlib.blake2b(array("Q", counts).tobytes(), digest_size=16)
    for copy in (*plan.saves, *plan.loads):
        digest.update(array("Q", copy).tobytes())
    columns = (rows.slots, rows.starts, rows.counts, rows.num_drafts, rows.tokens)
    for column in (*columns, rows.samples, rows.scores_prompt, rows.blocks):
        digest.update(column.tobytes())
    admitted = {admission.slot for admission in plan.admissions}
    for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
        if slot in admitted:
            digest.update(rows.tables[slot, : start // BLOCK_SIZE].tobytes())
    sampled = chain.from_iterable(result.tokens for result in committed)
    digest.update(array("q", sampled).tobytes())
    return digest.digest()
