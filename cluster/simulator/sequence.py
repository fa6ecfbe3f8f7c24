"""Sequence of a simulated engine: token counts and block names instead of tokens. Pure.

Two blocks are equal if their names are equal, like blocks with equal hashes in the product. The
name of a block within a prompt's shared parts (``Arrival.prefix``) depends on the tenant, the
block's index, and all parts up to the block's end. Any other name depends on the block's index and
the session, or on the index and the request if there is no session. Names replace hashes because
hashing the tokens of a long prompt would take longer than the rest of a simulation.
"""

from __future__ import annotations

import hashlib

from cluster.simulator.workloads.arrivals import Arrival
from everlift.errors import PromptTooLong
from everlift.hashes import BLOCK_SIZE, BLOCKS_PER_CHUNK, CHUNK_SIZE
from everlift.sampling import SamplingParams
from worker.engine.chunk import Chunk
from worker.engine.limits import Limits
from worker.engine.outcome import Outcome, SequenceKey, Stop
from worker.engine.sequence import Sequence

#: Value of every token, because token values are never used.
TOKEN = 1
_SAMPLING = SamplingParams(temperature=0.0)
_NO_TOKENS = Chunk(b"", b"", ())
_STEM_BYTES = 16


class BlockNames:
    """Names of the KV blocks of one request: ``names[i]`` is the name of its block i.

    ``index`` is the number of the request in the simulation.
    """

    __slots__ = ("_own", "_part_tokens", "_shared_tokens", "_stems")

    def __init__(self, index: int, arrival: Arrival) -> None:
        # The lowest bit distinguishes the numbers of sessions and requests.
        self._own = (arrival.session << 1 | 1 if arrival.session else index << 1).to_bytes(8)
        self._part_tokens = arrival.prefix_part_tokens
        self._shared_tokens = min(
            len(arrival.prefix) * arrival.prefix_part_tokens, arrival.prompt_tokens
        )
        self._stems: list[bytes] = []
        stem = arrival.tenant.encode()
        for part in arrival.prefix:
            stem = hashlib.blake2b(b"%b %d" % (stem, part), digest_size=_STEM_BYTES).digest()
            self._stems.append(stem)

    def __getitem__(self, block: int) -> bytes:
        end = (block + 1) * BLOCK_SIZE
        if end > self._shared_tokens:
            return self._own + block.to_bytes(4)
        return self._stems[(end - 1) // self._part_tokens] + block.to_bytes(4)

    def chunks(self, num_tokens: int) -> list[int]:
        """Return the ids of the full chunks (``CHUNK_SIZE`` tokens) of the first ``num_tokens``."""
        return [
            chunk_id(self[(number + 1) * BLOCKS_PER_CHUNK - 1])
            for number in range(num_tokens // CHUNK_SIZE)
        ]


def chunk_id(name: bytes) -> int:
    """Return the id of the chunk that ends with the block ``name``."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())


class NamedSequence(Sequence):
    """Sequence with block names instead of hashes, which ends after ``length`` output tokens.

    The known length replaces the stop token of a real output. The worker's scheduling policy does
    not use it, because a real worker does not know it.
    """

    __slots__ = ("length", "names")
    names: BlockNames
    #: number of output tokens after which the sequence ends
    length: int

    @classmethod
    def create(
        cls,
        epoch: int,
        request_id: str,
        arrival: Arrival,
        names: BlockNames,
        predicted_tokens: int,
        output_tokens: int = 0,
        num_computed: int = 0,
        num_cached: int = 0,
    ) -> NamedSequence:
        """Create a sequence that continues after ``output_tokens`` tokens of earlier attempts.

        ``epoch`` is the number of this attempt. ``num_computed`` is the number of prompt and output
        tokens that earlier attempts computed, and ``num_cached`` the number of tokens that are
        expected in the worker's prefix cache. ``predicted_tokens`` is the predicted length of the
        whole output; 0 means unknown.
        """
        sequence = cls(
            key=SequenceKey(epoch, 0),
            request_id=request_id,
            tokens=[TOKEN] * (arrival.prompt_tokens + output_tokens),
            num_prompt=arrival.prompt_tokens,
            max_tokens=max(1, arrival.max_tokens),
            sampling=_SAMPLING,
            stop_token_ids=frozenset(),
            salt=b"",
            priority=arrival.priority,
            session=arrival.session,
            predicted_tokens=predicted_tokens,
            num_computed_before=num_computed,
            num_expected_hits=num_cached,
        )
        sequence.names = names
        sequence.length = max(1, min(arrival.output_tokens, arrival.max_tokens))
        return sequence

    def block_hash(self, index: int) -> bytes:
        return self.names[index]

    def chunk(self, number: int) -> Chunk:
        return _NO_TOKENS

    def stop(self, limits: Limits) -> Stop | None:
        if (stop := super().stop(limits)) is not None:
            return stop
        return Stop.EOS if self.num_output >= self.length else None

    def earliest_end(self, limits: Limits) -> int:
        return min(self.num_prompt + self.length, super().earliest_end(limits))

    def end_at_start(self, limits: Limits, is_draining: bool) -> Outcome | None:
        """Return the result with which a worker ends this sequence on receipt; None if it starts.

        A draining worker returns the sequence to the router. Any other worker refuses a prompt that
        is too long, and ends an output that is already complete.
        """
        most = limits.max_model_len
        if is_draining:
            return self.outcome(Stop.RETURNED)
        if self.num_prompt >= most or self.num_known > most:
            return self.outcome(Stop.REFUSED, PromptTooLong())
        return None if (stop := self.stop(limits)) is None else self.outcome(stop)
