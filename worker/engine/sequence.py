"""Sequence inside the engine: one choice of a request, with its prompt and output. Pure.

    tokens      |---- prompt ----|-------- output --------|
                0            num_prompt               num_known
    KV cache    |------ computed ------|-- remaining --|
                0                 num_computed     num_known

The known tokens are the prompt and the output so far. A step computes the KV of some of the
remaining tokens. When the last known token is computed, the next one is sampled. Draft tokens may
be computed after the last known token; the sampled tokens show which drafts were right. A request
that ran at another worker may be continued here. Output from the other worker is treated like any
other output. Such a sequence differs from an undisturbed one only in ``num_computed``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from everlift.errors import (
    EmptyPrompt,
    EverliftError,
    InvalidRequest,
    OutOfRange,
    PromptTooLong,
)
from everlift.hashes import BLOCK_SIZE, BLOCKS_PER_CHUNK, CHUNK_SIZE, block_hash, block_hashes
from everlift.images import Image
from everlift.sampling import SamplingParams, TokenLogprobs
from everlift.v1 import session_pb2
from worker.engine.chunk import NO_PREFIX, Chunk, Prefix
from worker.engine.images import ProcessedImages
from worker.engine.limits import Limits, blocks_for
from worker.engine.outcome import NO_UPDATE, Outcome, Residence, SequenceKey, SequenceUpdate, Stop
from worker.engine.plan import UNKNOWN, Admission, Row, RowResult
from worker.engine.speculation import Drafter
from worker.engine.time_breakdown import TimeBreakdown

#: Slot of a sequence that is not in the batch.
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """Choice of a request; ``tokens`` are its prompt and output so far.

    ``max_tokens`` limits the output. ``order`` numbers the sequences by arrival (smaller = earlier)
    and does not change when the sequence is preempted. Sequences with a larger ``priority`` are
    admitted earlier and preempted later. Only sequences with the same ``salt`` can share KV blocks,
    because the salt is part of the hash of every block. The session with the number ``session``
    (0: none) retains the blocks of the sequence when the sequence is finished. ``adapter`` is the
    name of the LoRA adapter with which the sequence is computed (empty: none). ``adapter_digest``
    is the digest of the adapter's files, and ``adapter_source`` is their location
    (``AdapterSource``; empty: unknown).

    ``tokens`` has one placeholder token for each of ``images``. The engine replaces the
    placeholders by the images' own tokens, which are ``num_image_tokens`` more in total. All other
    numbers of tokens in this class count only ``tokens``.
    """

    key: SequenceKey
    request_id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    salt: bytes
    priority: int = 0
    session: int = 0
    adapter: str = ""
    adapter_digest: str = ""
    adapter_source: str = ""
    images: tuple[Image, ...] = ()
    #: set before the engine receives a sequence with images
    processed_images: ProcessedImages | None = None
    num_image_tokens: int = 0
    #: predicted number of tokens of the whole output; 0: unknown
    predicted_tokens: int = 0
    order: int = 0
    num_computed: int = 0
    slot: int = NO_SLOT
    block_table: tuple[int, ...] = ()
    #: number of leading blocks that were prefix-cache hits at its last admission
    num_hits: int = 0
    #: number of leading tokens that are expected to be prefix-cache hits at its first admission
    num_expected_hits: int = 0
    #: compiled grammar of ``sampling``, on the rank that samples
    grammar: object | None = None
    #: largest number of tokens computed before the last loss of its blocks, at this or an earlier
    #: worker
    num_computed_before: int = 0
    #: largest number of tokens computed at this worker before a preemption; their blocks are saved
    #: to host memory when evicted, if swapping is enabled
    num_to_restore: int = 0
    is_preempted: bool = False
    #: time of arrival at this worker, in seconds on the clock of ``Engine.step``
    arrived_at: float = 0.0
    #: seconds after its arrival at which its adapter was loaded; 0: it was loaded before
    adapter_s: float = 0.0
    #: whether the router must confirm the first step at this worker before it runs
    confirms_first_step: bool = False
    #: time breakdown up to when it last left the batch; None if it never did, or none is kept
    breakdown: TimeBreakdown | None = None
    #: changes that are not reported yet
    pending_update: SequenceUpdate = NO_UPDATE
    #: first prompt position whose score is not reported yet, if the prompt is scored
    next_score: int = 1
    #: set at its first decode if speculation is enabled
    drafter: Drafter | None = None
    _hashes: list[bytes] = field(default_factory=list)

    @classmethod
    def from_start(
        cls,
        start: session_pb2.Start,
        limits: Limits,
        prefix: Prefix = NO_PREFIX,
        images: tuple[Image, ...] = (),
    ) -> Self:
        """Return the new sequence that a Start message describes.

        ``prefix`` has the tokens that the message leaves out, which are those of an earlier valid
        sequence. ``images`` has the images, whose files the message may leave out. Raises
        InvalidRequest if the message is invalid, or if the sequence exceeds ``limits``.
        """
        if num_omitted(start, limits) != len(prefix.tokens):
            raise InvalidRequest("the tokens of omitted_prefix are missing")
        sequence = cls(
            key=SequenceKey(start.epoch, start.choice),
            request_id=start.request_id,
            tokens=[*prefix.tokens, *start.prompt_ids, *start.output_ids],
            num_prompt=start.omitted_prefix.num_prompt + len(start.prompt_ids),
            max_tokens=start.max_tokens,
            sampling=SamplingParams.from_proto(start.sampling, seed=0),
            stop_token_ids=frozenset(start.stop_token_ids),
            salt=start.salt,
            priority=start.priority,
            session=start.session,
            adapter=start.adapter,
            adapter_digest=start.adapter_digest or limits.adapters.get(start.adapter, ""),
            adapter_source=start.adapter_source,
            images=images,
            predicted_tokens=start.predicted_tokens,
            confirms_first_step=start.confirm_first_step,
        )
        sequence._hashes.extend(prefix.block_hashes)
        sequence.num_computed_before = min(start.num_computed, sequence.num_known)
        sequence._check(limits, len(prefix.tokens))
        sequence.num_expected_hits = min(start.expected_cached_tokens, sequence.num_reusable)
        return sequence

    def to_start(self) -> session_pb2.Start:
        """Return the Start message from which another rank or worker can continue this sequence."""
        return session_pb2.Start(
            epoch=self.key.epoch,
            choice=self.key.choice,
            request_id=self.request_id,
            prompt_ids=self.tokens[: self.num_prompt],
            output_ids=self.tokens[self.num_prompt :],
            max_tokens=self.max_tokens,
            sampling=self.sampling.to_proto(),
            stop_token_ids=sorted(self.stop_token_ids),
            salt=self.salt,
            num_computed=self.most_computed,
            priority=self.priority,
            session=self.session,
            adapter=self.adapter,
            adapter_digest=self.adapter_digest,
            adapter_source=self.adapter_source,
            predicted_tokens=self.predicted_tokens,
            expected_cached_tokens=self.num_expected_hits,
            images=[session_pb2.Image(digest=it.digest, data=it.data) for it in self.images],
        )

    def _check(self, limits: Limits, num_valid: int) -> None:
        if not self.key.epoch:
            raise InvalidRequest("epoch must be set")
        if not self.num_prompt:
            raise EmptyPrompt("the prompt has no tokens")
        if self.max_tokens < max(1, self.num_output):
            raise OutOfRange(
                f"max_tokens must be at least 1, and at least the {self.num_output} output tokens "
                f"so far, not {self.max_tokens}"
            )
        if max(self.tokens[num_valid:], default=0) >= limits.vocab_size:
            raise OutOfRange(f"token ids must be below the vocabulary size {limits.vocab_size}")
        self._check_length(limits)

    def _check_length(self, limits: Limits) -> None:
        num_prompt = self.num_prompt + self.num_image_tokens
        num_known = self.num_known + self.num_image_tokens
        if num_prompt >= limits.max_model_len or num_known > limits.max_model_len:
            raise PromptTooLong(
                f"{num_prompt} prompt tokens and {self.num_output} output tokens fill the "
                f"context of {limits.max_model_len}"
            )
        needed = blocks_for(num_known + 1)
        if self.stop(limits) is None and needed > limits.num_blocks:
            raise PromptTooLong(
                f"{num_known} tokens need {needed} blocks of KV cache; "
                f"this worker has {limits.num_blocks}"
            )

    def set_processed_images(self, processed: ProcessedImages, limits: Limits) -> None:
        """Set the processed images. Raises PromptTooLong if their tokens exceed ``limits``."""
        self.processed_images = processed
        self.num_image_tokens = len(processed.prompt_ids) - self.num_prompt
        self._check_length(limits)

    def position_of(self, num_tokens: int) -> int:
        """Convert ``num_tokens``, a position in the engine's tokens, to a position in ``tokens``.

        The engine's tokens include ``num_image_tokens`` additional tokens. All of these are
        subtracted, but the result is at least 0. The result is thus too small until the last image
        has been computed.
        """
        return max(0, num_tokens - self.num_image_tokens)

    @property
    def num_known(self) -> int:
        return len(self.tokens)

    @property
    def num_uncached(self) -> int:
        """Expected number of known tokens to prefill when the sequence is admitted."""
        return len(self.tokens) - self.num_expected_hits

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def expected_output(self) -> int:
        """Predicted length of the whole output in tokens, or ``max_tokens`` without a prediction.

        The prediction is limited to ``max_tokens``, and is at least one more than the current
        output.
        """
        predicted = self.predicted_tokens or self.max_tokens
        return max(self.num_output + 1, min(predicted, self.max_tokens))

    @property
    def remaining(self) -> int:
        """Number of known tokens whose KV is not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def most_computed(self) -> int:
        """Largest number of tokens that were ever computed, at this or an earlier worker."""
        before, now = self.num_computed_before, self.num_computed
        return before if before > now else now

    @property
    def num_blocks_lacking(self) -> int:
        """Number of blocks that the known tokens need in addition to the block table.

        It is 0 if the table is long enough.
        """
        lacking = blocks_for(len(self.tokens)) - len(self.block_table)
        return lacking if lacking > 0 else 0

    @property
    def is_scoring(self) -> bool:
        """Return whether log probabilities of the prompt are still to be reported."""
        return self.sampling.prompt_logprobs is not None and self.next_score < self.num_prompt

    @property
    def num_reusable(self) -> int:
        """Number of leading tokens whose KV may come from the prefix cache.

        The others must be computed, because their logits are needed to sample the next token or for
        the requested log probabilities of the prompt.
        """
        return self.next_score - 1 if self.is_scoring else self.num_known - 1

    def stop(self, limits: Limits) -> Stop | None:
        """Return the cause if the sequence ends with its current tokens; None if it continues."""
        num_output = self.num_output
        if num_output > self.sampling.min_tokens and self.tokens[-1] in self.stop_token_ids:
            return Stop.EOS
        num_known = len(self.tokens) + self.num_image_tokens
        if num_output >= self.max_tokens or num_known >= limits.max_model_len:
            return Stop.LENGTH
        return None

    def earliest_end(self, limits: Limits) -> int:
        """Return the smallest number of known tokens at which a length limit ends the sequence.

        With fewer tokens, only a stop token can end the sequence.
        """
        outgrown = limits.num_blocks * BLOCK_SIZE + 1
        return min(self.num_prompt + self.max_tokens, limits.max_model_len, outgrown)

    def append_sampled(self, result: RowResult) -> Outcome:
        """Append the one sampled token of ``result``, and return the outcome that reports it.

        From now on all earlier tokens count as computed, and ``pending_update`` is empty.
        """
        tokens, logprobs = result.tokens, result.logprobs
        computed = self.num_computed = len(self.tokens)
        self.tokens.append(tokens[0])
        offset, update = computed - self.num_prompt, self.pending_update
        self.pending_update = NO_UPDATE
        # Most outcomes of a step are made here, and keyword arguments would double the time.
        return Outcome(self.key, offset, tokens, None, None, logprobs, 0, (), computed, update)

    def append_repeated(self, token: int, times: int) -> None:
        """Append ``times`` sampled tokens, all equal to ``token``, without an outcome.

        All tokens but the last then count as computed.
        """
        self.tokens.extend([token] * times)
        self.num_computed = len(self.tokens) - 1

    def mark_launched(self, num_computed: int, samples: bool) -> None:
        """Record that a row of this sequence was launched, as if the row had been computed.

        ``num_computed`` is the value after that row. If the row samples a token (``samples``),
        UNKNOWN is appended in its place.
        """
        self.num_computed = num_computed
        if samples:
            self.tokens.append(UNKNOWN)

    def commit_step(self, num_computed: int, sampled: bool) -> None:
        """Undo ``mark_launched``; ``num_computed`` is the value before the launched row.

        UNKNOWN is removed if the row samples a token (``sampled``).
        """
        self.num_computed = num_computed
        if sampled:
            self.tokens.pop()

    @property
    def is_sampling(self) -> bool:
        """Return whether the last token is UNKNOWN: the step in flight samples it."""
        return self.tokens[-1] == UNKNOWN

    # reports

    def mark_admitted(self, now: float) -> None:
        """Record in ``pending_update`` that the sequence was admitted to the batch at ``now``.

        The first admission sets ``waited_s`` and ``cached_tokens``. An admission after a preemption
        sets ``residence`` to RESUMED.
        """
        if self.is_preempted:
            self.is_preempted = False
            self.pending_update = self.pending_update._replace(residence=Residence.RESUMED)
        else:
            waited_s = max(0.0, now - self.arrived_at)
            self.pending_update = self.pending_update._replace(
                waited_s=waited_s, cached_tokens=self.num_computed, adapter_s=self.adapter_s
            )

    def mark_preempted(self) -> None:
        """Record in ``pending_update`` that the sequence was preempted and lost its blocks."""
        self.is_preempted, self.num_expected_hits = True, 0
        count = self.pending_update.preemptions + 1
        self.pending_update = self.pending_update._replace(
            residence=Residence.PREEMPTED, preemptions=count
        )

    def count_recomputed(self, num_tokens: int) -> None:
        count = self.pending_update.recomputed_tokens + num_tokens
        self.pending_update = self.pending_update._replace(recomputed_tokens=count)

    def take_update(self) -> SequenceUpdate:
        update, self.pending_update = self.pending_update, NO_UPDATE
        return update

    def outcome(self, stop: Stop | None = None, error: EverliftError | None = None) -> Outcome:
        """Return an outcome without new tokens that reports ``pending_update``, and clear that.

        If ``stop`` is given, the outcome also reports the end of the sequence.
        """
        return Outcome(
            self.key,
            self.num_output,
            stop=stop,
            error=error,
            num_computed=self.most_computed,
            update=self.take_update(),
        )

    def prefill_progress(self) -> Outcome:
        """Return an outcome that reports only how many tokens this worker has computed so far."""
        return Outcome(
            self.key,
            self.num_output,
            num_computed=self.most_computed,
            prefilled_tokens=self.num_computed,
        )

    # rows

    def admission(self) -> Admission:
        """Return the admission, which the runner needs before it computes the first row."""
        return Admission(
            slot=self.slot,
            tokens=tuple(self.tokens),
            num_prompt=self.num_prompt,
            sampling=self.sampling,
            stop_token_ids=self.stop_token_ids,
            choice=self.key.choice,
            grammar=self.grammar,
            adapter=self.adapter_digest,
        )

    def row(self, count: int, drafts: tuple[int, ...] = ()) -> Row:
        """Return the sequence's part of a step: ``count`` known tokens, then ``drafts``."""
        end = self.num_computed + count
        return Row(
            slot=self.slot,
            tokens=(*self.tokens[self.num_computed : end], *drafts),
            start=self.num_computed,
            block_table=self.block_table,
            samples=end == self.num_known,
            num_drafts=len(drafts),
            scores_prompt=self.is_scoring and end >= self.next_score,
        )

    def score(
        self, row: Row, logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[int, tuple[TokenLogprobs, ...]]:
        """Select from ``logprobs`` the entries of prompt tokens that have not been reported yet.

        ``logprobs`` are the log probabilities that ``row`` computed, beginning with the token at
        position ``row.start + 1``. Return the position of the first selected token, and the
        selected log probabilities, which count as reported from now on.
        """
        first = self.next_score
        self.next_score = min(row.start + len(row.tokens), self.num_prompt - 1) + 1
        return first, logprobs[first - (row.start + 1) :]

    def hashes_to_restore(self) -> list[bytes]:
        """Return the hashes of the full blocks whose KV was computed before a preemption.

        The preemption with the most computed tokens is used if there were several. The list is
        empty if this worker never preempted the sequence.
        """
        return [self.block_hash(i) for i in range(self.num_to_restore // BLOCK_SIZE)]

    def block_hash(self, index: int) -> bytes:
        """Return the hash of block ``index``, whose tokens must all be known."""
        while len(self._hashes) <= index:
            start = len(self._hashes) * BLOCK_SIZE
            parent = self._hashes[-1] if self._hashes else self.salt
            self._hashes.append(block_hash(parent, self.tokens[start : start + BLOCK_SIZE]))
        return self._hashes[index]

    def chunk_hashes(self) -> list[bytes]:
        """Return the hash of each full prefix chunk (CHUNK_SIZE known tokens), in order.

        The hash of a chunk is that of its last block. The hashes of all full blocks are computed
        and kept for ``block_hash``.
        """
        parent, done = self._hashes[-1] if self._hashes else self.salt, len(self._hashes)
        self._hashes += block_hashes(self.tokens[done * BLOCK_SIZE :], parent)
        return self._hashes[BLOCKS_PER_CHUNK - 1 :: BLOCKS_PER_CHUNK]

    def chunk(self, number: int) -> Chunk:
        """Return prefix chunk ``number``, from 0, whose CHUNK_SIZE tokens must all be known."""
        first, end = number * BLOCKS_PER_CHUNK, (number + 1) * BLOCKS_PER_CHUNK
        parent = self.block_hash(first - 1) if number else self.salt
        self.block_hash(end - 1)  # also computes the earlier hashes
        tokens = self.tokens[number * CHUNK_SIZE : (number + 1) * CHUNK_SIZE]
        return Chunk.of(parent, tokens, self._hashes[first:end])


def num_omitted(start: session_pb2.Start, limits: Limits) -> int:
    """Return the number of leading tokens that a Start message leaves out.

    Raises InvalidRequest if the number is not a multiple of CHUNK_SIZE, or if output tokens are
    left out but not all prompt tokens. Raises PromptTooLong, an InvalidRequest, if the number is
    larger than ``limits.max_model_len``.
    """
    omitted = start.omitted_prefix
    count = omitted.num_prompt + omitted.num_output
    if count % CHUNK_SIZE or (omitted.num_output and start.prompt_ids):
        raise InvalidRequest(
            f"omitted_prefix has {count} tokens: expected whole chunks of {CHUNK_SIZE} tokens, and "
            f"no prompt_ids if it has output"
        )
    if count > limits.max_model_len:
        raise PromptTooLong(
            f"omitted_prefix has {count} tokens; the context has {limits.max_model_len}"
        )
    return count
