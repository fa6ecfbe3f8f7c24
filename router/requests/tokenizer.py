"""Tokenizer and limits of a served model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

import tokenizers

from everlift import model_files
from everlift.adapters import AdapterSource
from everlift.checks import check_range
from everlift.end_tokens import end_token_ids
from everlift.errors import (
    ContextLengthExceeded,
    EmptyPrompt,
    InvalidRequest,
    NoWorker,
    OutOfRange,
    PromptTextTooLong,
    PromptTooLong,
    UnknownModel,
    UnsupportedContent,
)
from everlift.hashes import BLOCK_SIZE, CHUNK_SIZE, chunk_hashes, chunk_id
from everlift.hub import name_for_clients
from everlift.images import MAX_IMAGES, Image
from everlift.messages import MAX_N, Request, Submission
from everlift.sampling import SamplingParams
from everlift.text import Vocabulary
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from everlift.vocabulary import byte_level, byte_piece, decoder_types
from router.chat.checks import json_length
from router.leader.adapter_catalogue import AdapterEntry
from router.requests import splicing
from router.requests.sampling_defaults import of_model
from router.requests.splicing import Turn

#: Maximum number of characters of a token. The longest tokens of common vocabularies are runs of
#: 128 spaces.
_MAX_CHARACTERS_PER_TOKEN = 128
#: A text with more bytes than this per token of the context is counted in pieces before all of it
#: is tokenised. Prose has 3 to 5 bytes per token, so few texts that fit are counted.
_COUNTED_BYTES_PER_TOKEN = 6
#: Number of characters of such a piece.
_COUNTED_CHARACTERS = 1 << 14
#: Names of the context length in the configurations of the model families.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
#: Value of a limit that the configuration does not state. The limits that workers announce bound
#: every request anyway.
_UNBOUNDED = 1 << 30
#: Maximum number of tokens of a prompt and its output together. All choices of a request then have
#: fewer than 2^32 tokens, so that their sums fit into the fields of messages.
_MAX_SEQUENCE = (1 << 32) // MAX_N - 1
#: Maximum number of log probabilities of a prompt, including alternatives. They are sent to the
#: ledger and to the client in one message, and more would block the event loop for too long.
_MAX_PROMPT_LOGPROBS = 1 << 18
#: Maximum number of log probabilities of the output of all choices, including alternatives. They
#: stay in the memory of the router and of the ledger.
_MAX_LOGPROBS = 1 << 22
#: Minimum number of characters of a part of a text that is tokenised separately.
_PART_CHARACTERS = 1 << 14
#: Maximum number of parts in one call of the tokenizer, each of which takes a core. Half of the
#: cores are left to the event loop and others. Converting the results of more parts would delay
#: other threads.
_PARTS_PER_CALL = max(1, min(8, (os.cpu_count() or 1) // 2))
#: Number of token ids that are copied at once; other threads can run only between two such copies.
_IDS_PER_COPY = 1 << 14


class Tokenizer(splicing.Tokenizer, Protocol):
    #: whether ``encode`` adds special tokens after a text
    adds_end: bool

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """Texts of all special tokens, by token id."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class HuggingFaceTokenizer:
    def __init__(self, path: Path) -> None:
        """Load the file tokenizer.json at ``path``. Raises UnknownModel if it is invalid."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a plain Exception
            raise UnknownModel(f"{path} is not a valid tokenizer: {error}") from None
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {i: token.content for i, token in added.items() if token.special}
        self.boundaries = {
            i: token.content
            for i, token in added.items()
            if token.special and not (token.lstrip or token.normalized or token.single_word)
        }
        self.boundary = splicing.boundary_pattern(self.boundaries.values())
        self.vocab_size = self._tokenizer.get_vocab_size()
        decoder = self._tokenizer.decoder
        types = decoder_types(None if decoder is None else json.loads(decoder.__getstate__()))
        self._is_byte_level = "ByteLevel" in types
        self._has_byte_pieces = "ByteFallback" in types
        #: bytes of a token, by token id and whether the token is the first of its text
        self._bytes: dict[tuple[int, bool], bytes] = {}
        self.adds_end = False
        self.adds_end = self.encode("a")[-1:] != self.encode("a", add_special_tokens=False)[-1:]

    # The tokenizers library releases the global interpreter lock only in its batch methods.

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        first, *rest = self._parts(text)
        ids = self._encode_batch([first], add_special_tokens=add_special_tokens)
        for start in range(0, len(rest), _PARTS_PER_CALL):
            ids += self._encode_batch(rest[start : start + _PARTS_PER_CALL])
        return ids

    def _parts(self, text: str) -> list[str]:
        """Return the parts of a text; a long text is cut at the beginnings of special tokens.

        The token ids of all parts, in order, are those of the whole text. No text is cut if the
        tokenizer ``adds_end``.
        """
        parts, start = [], 0
        while not self.adds_end and (
            boundary := self.boundary.search(text, start + _PART_CHARACTERS)
        ):
            parts.append(text[start : boundary.start()])
            start = boundary.start()
        return [*parts, text[start:]]

    def _encode_batch(self, texts: list[str], *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        for encoding in self._tokenizer.encode_batch_fast(
            texts, add_special_tokens=add_special_tokens
        ):
            ids += encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_string(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        key = token_id, is_first
        if (data := self._bytes.get(key)) is None:
            if token_id in self.special_tokens or (token := self.token_string(token_id)) is None:
                return None
            data = self._bytes[key] = self._bytes_of(token_id, token, is_first=is_first)
        return data

    def _bytes_of(self, token_id: int, token: str, *, is_first: bool) -> bytes:
        if self._is_byte_level:
            return byte_level(token)
        piece = byte_piece(token) if self._has_byte_pieces else None
        # Decoders strip a space at the beginning of a text, even if its token is a byte token.
        if piece is not None and not (is_first and piece == b" "):
            return piece
        first = self.decode([token_id])
        # Decoders treat the first token of a text differently from later tokens.
        text = first if is_first else self.decode([token_id] * 2)[len(first) :]
        return text.encode()

    def with_special_tokens(self) -> Vocabulary:
        return _WithSpecialTokens(self)


class _WithSpecialTokens:
    """View of a tokenizer that decodes special tokens to their texts instead of omitting them."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._base = tokenizer
        self.token_string = tokenizer.token_string

    def decode(self, ids: Sequence[int]) -> str:
        return self._base.decode(ids, skip_special_tokens=False)

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        if (text := self._base.special_tokens.get(token_id)) is not None:
            return text.encode()
        return self._base.token_bytes(token_id, is_first=is_first)

    def with_special_tokens(self) -> Vocabulary:
        return self


#: Bytes of each token of ByteTokenizer, by token id.
_BYTES = [bytes([token]) if token < 256 else f"<{token}>".encode() for token in range(1024)]


class ByteTokenizer:
    """Tokenizer of the fake model: tokens below 256 are bytes, others are written as numbers."""

    vocab_size = len(_BYTES)
    special_tokens: Mapping[int, str] = {}
    boundaries: Mapping[int, str] = {}
    boundary = splicing.boundary_pattern(())
    adds_end = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(_BYTES.__getitem__, ids)).decode(errors="replace")

    def token_string(self, token_id: int) -> str | None:
        if 128 <= token_id < 256:
            return f"<0x{token_id:02X}>"
        return _BYTES[token_id].decode() if token_id < self.vocab_size else None

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        return _BYTES[token_id] if token_id < self.vocab_size else None

    def with_special_tokens(self) -> Vocabulary:
        return self


@dataclass(slots=True)
class ServedModel:
    """Tokenizer and limits of a served model.

    ``context`` is the context length in tokens that the model's configuration states.
    ``max_model_len`` is the number of tokens of prompt and output together that every worker can
    hold, or None until a worker has announced its limit. ``fingerprint`` identifies the weights and
    settings with which the workers run the model; it is empty until a worker has announced it.
    ``directory`` is None for the fake model. ``sampling_defaults`` apply to parameters that a
    request does not set. ``aliases`` are further names that clients may use. ``adapters`` has the
    sources of the model's LoRA adapters, by name: those of the settings and those that operators
    have loaded. With ``clamps_max_tokens``, the max_tokens of every request is lowered to the part
    of the context that the prompt leaves free. With ``computes_chunks``, requests have the ids of
    their prompts' chunks. ``max_images`` and ``max_image_bytes`` limit the images of a request;
    workers may take fewer.
    """

    name: str
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    vocab_size: int
    context: int
    directory: Path | None = None
    sampling_defaults: SamplingParams = field(default_factory=SamplingParams)
    clamps_max_tokens: bool = False
    computes_chunks: bool = False
    max_images: int = MAX_IMAGES
    max_image_bytes: int = 4 << 20
    aliases: tuple[str, ...] = ()
    adapters: Mapping[str, AdapterSource] = field(default_factory=dict)
    max_model_len: int | None = field(default=None, init=False)
    fingerprint: str = ""
    #: maximum number of tokens of a sequence that a worker can hold, by worker id
    _capacities: dict[str, int] = field(default_factory=dict, init=False)
    #: number of images that every worker takes; None until a worker has announced it
    _worker_images: int | None = field(default=None, init=False)
    #: digests of the adapters' files by name; empty if no worker has announced one yet
    adapter_digests: Mapping[str, str] = field(default_factory=dict, init=False)
    #: digests of the adapters of the settings that connected workers have announced, by name
    _announced: dict[str, str] = field(default_factory=dict, init=False)
    #: adapters that operators have loaded, by name
    _catalogue: Mapping[str, AdapterEntry] = field(default_factory=dict, init=False)
    #: whether a connected worker loads adapters at run time
    _loads_adapters: bool = field(default=False, init=False)

    @classmethod
    def load(
        cls,
        model: str,
        revision: str = "",
        *,
        sampling_defaults: Literal["model", "none"] = "model",
    ) -> Self:
        """Load tokenizer and limits of a model, without its weights.

        ``model`` is a directory in Hugging Face format, a GGUF file, a Hugging Face hub id whose
        files, at ``revision``, were downloaded before, or "fake" (no files).
        ``sampling_defaults`` selects the defaults in the model's generation_config.json ("model")
        or Everlift's own ("none").

        Raises ModelUnavailable if the model is not found, and UnknownModel if one of its files is
        missing or invalid.
        """
        if model == "fake":
            return cls("fake", ByteTokenizer(), (), ByteTokenizer.vocab_size, 4096)
        directory = model_files.locate(model, revision, weights=False)
        config, tokenizer = directory / "config.json", directory / "tokenizer.json"
        for path in (config, tokenizer):
            if not path.is_file():
                raise UnknownModel(f"no model at {model!r}: {path.name} is missing there")
        vocab_size, context = _sizes(config)
        return cls(
            name=name_for_clients(model, revision),
            tokenizer=HuggingFaceTokenizer(tokenizer),
            eos_ids=end_token_ids(directory),
            vocab_size=vocab_size,
            context=context,
            directory=directory,
            sampling_defaults=(
                of_model(directory) if sampling_defaults == "model" else SamplingParams()
            ),
        )

    def assume_limit(self, last: session_pb2.WorkerInfo) -> None:
        """Use the limits in ``last``, which a worker announced in the past.

        The limits apply until a worker is connected (``update_limits``). The fingerprint stays
        unknown until then.
        """
        self.max_model_len = _capacity(last)
        self._worker_images = last.max_images

    def update_limits(self, workers: Sequence[session_pb2.WorkerInfo]) -> None:
        """Use the limits, the fingerprint and the adapters that the connected workers announced.

        The values in effect are kept if ``workers`` is empty.
        """
        self._capacities = {worker.worker_id: _capacity(worker) for worker in workers}
        if workers:
            self._announced = {
                name: digest for worker in workers for name, digest in worker.adapters.items()
            }
            self._loads_adapters = any(worker.adapter_slots for worker in workers)
            self._update_digests()
            self.fingerprint = workers[-1].fingerprint
            self.max_model_len = min(self._capacities.values())
            self._worker_images = min(worker.max_images for worker in workers)

    def set_adapters(self, sources: Iterable[AdapterSource]) -> None:
        """Serve the LoRA adapters of the settings."""
        self.adapters = {source.name: source for source in sources}
        self._update_digests()

    def set_catalogue(self, entries: Mapping[str, AdapterEntry]) -> None:
        """Serve the adapters of ``entries`` that adapt this model, besides those of the settings.

        The entries of an earlier call are replaced.
        """
        configured = {
            name: source for name, source in self.adapters.items() if name not in self._catalogue
        }
        self._catalogue = {
            name: entry for name, entry in entries.items() if entry.model == self.name
        }
        loaded = {name: AdapterSource.parse(it.source) for name, it in self._catalogue.items()}
        self.adapters = configured | loaded
        self._update_digests()

    def _update_digests(self) -> None:
        digests = {name: entry.digest for name, entry in self._catalogue.items()}
        self.adapter_digests = {
            name: digests.get(name) or self._announced.get(name, "") for name in self.adapters
        }

    @property
    def longest_sequence(self) -> int:
        """Return the maximum number of tokens of a prompt and its output together.

        The limit is ``max_model_len``, or ``context`` until a worker has announced its limit. It is
        less than 2^32 / MAX_N.
        """
        limit = self.context if self.max_model_len is None else self.max_model_len
        return min(limit, _MAX_SEQUENCE)

    def fits(self, request: Request) -> bool:
        """Return whether every worker can hold the prompt and max_tokens output tokens.

        The result is always True for a request with ``clamp_max_tokens``, whose output ends when
        the context is full.
        """
        total = len(request.prompt_ids) + request.max_tokens
        return request.clamp_max_tokens or total <= self.longest_sequence

    def check_worker(self, request: Request, worker_id: str) -> None:
        """Raise ContextLengthExceeded if a worker cannot hold a request's prompt and max_tokens.

        The request may have been accepted before this worker was known. An unknown worker, or a
        request with ``clamp_max_tokens``, passes the check.
        """
        capacity = self._capacities.get(worker_id)
        if capacity is not None and not request.clamp_max_tokens:
            _check_total(len(request.prompt_ids), request.max_tokens, capacity)

    @property
    def names(self) -> list[str]:
        """Return all names that clients may use: model name, aliases, then names of adapters."""
        return [*dict.fromkeys((self.name, *self.aliases, *self.adapters))]

    def parent_of(self, name: str) -> str | None:
        """Return the name of the model that an adapter adapts; None if ``name`` is no adapter."""
        return self.name if name in self.adapters else None

    def root_of(self, name: str) -> str:
        """Return the hub id or the directory's name of the adapter or model with this name."""
        adapter = self.adapters.get(name)
        return self.name if adapter is None else adapter.root

    def check_images(self, images: Sequence[Image]) -> None:
        """Check the number and the total size of a request's images.

        Raises UnsupportedContent if the model takes no images, and OutOfRange for too many images
        or bytes.
        """
        if not images:
            return
        if self._worker_images == 0:
            raise UnsupportedContent(
                f"the model {self.name!r} takes no images with the engine of its workers",
                field="images",
            )
        limit = min(self.max_images, self._worker_images or MAX_IMAGES)
        if len(images) > limit:
            raise OutOfRange(
                f"the request has {len(images)} images; at most {limit} are allowed "
                "(router.max_images, and the model's own limit)",
                field="images",
            )
        if (size := sum(len(image.data) for image in images)) > self.max_image_bytes:
            raise OutOfRange(
                f"the images have {size} bytes; at most {self.max_image_bytes} are allowed "
                "(router.max_image_bytes)",
                field="images",
            )

    def with_fingerprint(self, request: Request, *, has_output: bool) -> Request:
        """Return the request with the fingerprint of the model that workers announced.

        ``has_output`` states whether the request has output already. A request without output also
        gets the present version of its adapter. A request with output keeps its adapter's version,
        which workers that load adapters at run time can still load.

        Raises UnknownModel if the adapter is no longer served, or if the request has output of
        another fingerprint or adapter version. Another fingerprint means other weights, another
        tokenizer or other settings. The adapter is not checked if the request has output, the
        version is known, and a connected worker loads adapters at run time. A fingerprint or
        version that is not known yet matches every other one.
        """
        request = self._with_adapter(request, has_output=has_output)
        if self.fingerprint in ("", request.fingerprint):
            return request
        if has_output:
            _check_same(f"the model {self.name!r}", request.fingerprint, self.fingerprint)
        return replace(request, fingerprint=self.fingerprint)

    def _with_adapter(self, request: Request, *, has_output: bool) -> Request:
        adapter, before = request.adapter, request.adapter_digest
        if not adapter or (has_output and before and self._loads_adapters):
            return request
        if adapter not in self.adapters:
            raise UnknownModel(f"the adapter {adapter!r} is no longer served")
        digest, source = self.adapter_digests[adapter], str(self.adapters[adapter])
        if has_output:
            _check_same(f"the adapter {adapter!r}", before, digest)
        request = replace(request, adapter_digest=digest or before, adapter_source=source)
        return request if digest in ("", before) else self._with_salt(request)

    def _with_salt(self, request: Request) -> Request:
        """Return the request with a salt that no other version of its adapter has.

        The request's ``adapter_digest`` must be that of the new version. The hashes and ids of the
        prompt's chunks are computed anew, because they depend on the salt.
        """
        salt = hashlib.sha256(request.salt + request.adapter_digest.encode()).digest()
        hashes = chunk_hashes(request.prompt_ids, salt)
        chunks = tuple(map(chunk_id, hashes)) if request.chunks else ()
        return replace(request, salt=salt, chunk_hashes=tuple(hashes), chunks=chunks)

    def resolve(self, submission: Submission, turns: Sequence[Turn] = ()) -> Request:
        """Return a submission's request, with all defaults filled in and all limits checked.

        ``turns`` are earlier turns of the submission's session; the prompt reuses their token ids.

        Raises NoWorker if workers are connected but none has announced the adapter, and no operator
        has loaded it. Raises EmptyPrompt, PromptTooLong or ContextLengthExceeded, and OutOfRange
        for an invalid token id, parameter, or number or size of images. Raises UnsupportedContent
        if the model takes no images. Raises InvalidRequest if a bad word has no tokens, or if the
        restrictions may leave no token to sample.
        """
        self._check_adapter(submission.adapter)
        self.check_images(submission.images)
        prompt_ids, turn, hashes = self._prompt(submission, turns)
        max_output = self._max_output(len(prompt_ids))
        is_clamped = submission.clamp_max_tokens or self.clamps_max_tokens
        if submission.max_tokens is not None and not is_clamped:
            _check_total(len(prompt_ids), submission.max_tokens, self.longest_sequence)
        max_tokens = min(max_output, submission.max_tokens or max_output)
        self._check_ids("stop_token_ids", submission.stop_token_ids)
        sampling = self._with_bad_words(submission)
        self._check_sampling(sampling, max_tokens)
        _check_amount(submission, len(prompt_ids), max_tokens)
        eos_ids = () if submission.ignore_eos else self.eos_ids
        _check_tokens_remain(sampling, {*submission.stop_token_ids, *eos_ids}, self.vocab_size)
        hashes += chunk_hashes(
            prompt_ids[len(hashes) * CHUNK_SIZE :], hashes[-1] if hashes else submission.salt
        )
        return Request(
            request_id=submission.request_id,
            model=self.name,
            fingerprint=self.fingerprint,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=submission.stop,
            stop_token_ids=tuple(dict.fromkeys(submission.stop_token_ids + eos_ids)),
            eos_token_ids=eos_ids,
            on_disconnect=submission.on_disconnect,
            deadline=None,
            body_hash=submission.body_hash,
            salt=submission.salt,
            n=submission.n,
            include_stop=submission.include_stop,
            priority=submission.priority,
            ttft_target_s=submission.ttft_target_s,
            trace=submission.trace,
            session_id=submission.session_id,
            fairness_id=submission.fairness_id,
            x_request_id=submission.x_request_id,
            application=submission.application,
            clamp_max_tokens=is_clamped or submission.max_tokens is None,
            keep_special_tokens=submission.keep_special_tokens,
            attachment=submission.attachment,
            chunks=self._chunks(submission, hashes),
            chunk_hashes=tuple(hashes),
            turn=turn,
            adapter=submission.adapter,
            adapter_digest=submission.adapter_digest,
            adapter_source=str(self.adapters.get(submission.adapter, "")),
            images=submission.images,
            prompt_field=_as_field(prompt_ids),
        )

    def _check_adapter(self, adapter: str) -> None:
        if adapter and self._capacities and not self.adapter_digests.get(adapter):
            raise NoWorker(f"no connected worker serves the adapter {adapter!r} yet: try again")

    def _chunks(self, submission: Submission, hashes: Sequence[bytes]) -> tuple[int, ...]:
        # A prompt whose log probabilities are requested is computed as a whole, even if some worker
        # has its chunks in the prefix cache.
        if not self.computes_chunks or submission.sampling.prompt_logprobs is not None:
            return ()
        return tuple(map(chunk_id, hashes))

    def _max_output(self, num_prompt: int) -> int:
        max_output = self.longest_sequence - num_prompt
        if max_output < 1:
            detail = f"the prompt of {num_prompt} tokens leaves no room for an output token"
            raise PromptTooLong(self._too_long(detail), field="prompt")
        return max_output

    def _prompt(
        self, submission: Submission, turns: Sequence[Turn]
    ) -> tuple[tuple[int, ...], bytes, list[bytes]]:
        """Return a prompt's token ids, its PromptMark as bytes, and hashes of its first chunks.

        The mark and the hashes are empty unless the prompt is a text that belongs to a session.
        A prompt is truncated if the submission says so. Raises the errors of ``resolve`` for an
        invalid or too long prompt.
        """
        prompt, has_added = submission.prompt, submission.add_special_tokens
        limit = self._truncated_length(submission)
        if not isinstance(prompt, str):
            self._check_ids("prompt", prompt)
            return prompt[-limit:], b"", []
        self.check_fits(prompt)
        turn, hashes = b"", list[bytes]()
        # A text that will be truncated may have more tokens than the context.
        encode = self.encode_prompt if submission.truncate_prompt_tokens is None else self.encode
        if not submission.session_id or (has_added and self.tokenizer.adds_end):
            ids = encode(prompt, add_special_tokens=has_added)
        else:
            spliced = splicing.splice(prompt, turns, self.tokenizer, encode, has_added=has_added)
            ids, turn, hashes = spliced.ids, spliced.mark.to_bytes(), [*spliced.chunk_hashes]
        if not ids:
            raise EmptyPrompt("the prompt has no tokens", field="prompt")
        return (ids, turn, hashes) if len(ids) <= limit else (ids[-limit:], b"", [])

    def _truncated_length(self, submission: Submission) -> int:
        """Return the number of tokens to which the submission's prompt is truncated."""
        match submission.truncate_prompt_tokens:
            case None:
                return sys.maxsize
            case -1:
                return max(1, self.longest_sequence - (submission.max_tokens or 1))
            case num_tokens:
                return num_tokens

    def check_prompt(self, prompt: str | Sequence[int]) -> None:
        """Check a prompt before it is tokenised.

        Raises PromptTooLong if it is certainly longer than the context (a text is judged by its
        number of characters), and OutOfRange for a token id outside the vocabulary.
        """
        self.check_fits(prompt)
        if not isinstance(prompt, str):
            self._check_ids("prompt", prompt)

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt or of a part of one.

        Raises PromptTooLong, before all of the text is tokenised, if it has far more tokens than
        the context. The result can still exceed the context, so the caller must check its length.
        """
        self.check_fits(text)
        self._check_count(text)
        return self.encode(text, add_special_tokens=add_special_tokens)

    def _check_count(self, text: str) -> None:
        """Raise PromptTooLong if a long text has more than twice the tokens of the context.

        The text is tokenised in parts of 16,384 characters, up to the part at which the sum exceeds
        this limit. Cuts between parts can increase the number of tokens. The factor of two is a
        margin for this increase, so a text that fits is never rejected.
        """
        # A cut changes only the tokens of the word that it divides, because tokenizers first split
        # a text into words.
        limit = self.longest_sequence
        if len(text.encode()) <= _COUNTED_BYTES_PER_TOKEN * limit:
            return
        num_tokens = 0
        for start in range(0, len(text), _COUNTED_CHARACTERS):
            piece = text[start : start + _COUNTED_CHARACTERS]
            num_tokens += len(self.tokenizer.encode(piece, add_special_tokens=False))
            if num_tokens > 2 * limit:
                detail = (
                    f"the first {start + len(piece)} of its {len(text)} characters have about "
                    f"{num_tokens} tokens"
                )
                raise PromptTooLong(self._too_long(detail), field="prompt")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, which may exceed the context.

        Raises PromptTextTooLong if the number of characters alone shows that the text exceeds the
        context by far.
        """
        self.check_fits(text)
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def check_fits(self, prompt: str | Sequence[int]) -> None:
        """Raise PromptTooLong if a prompt is certainly longer than the context.

        This is fast because a text is not tokenised: only its characters are counted.
        """
        if isinstance(prompt, str):
            # Each token stands for a limited number of characters, so this text is certainly too
            # long.
            if len(prompt) > self.longest_sequence * _MAX_CHARACTERS_PER_TOKEN:
                detail = f"{len(prompt)} characters do not fit"
                raise PromptTextTooLong(self._too_long(detail), field="text")
        elif len(prompt) > self.longest_sequence:
            detail = f"{len(prompt)} tokens do not fit"
            raise PromptTooLong(self._too_long(detail), field="tokens")

    def _too_long(self, detail: str) -> str:
        return (
            "the prompt is too long: this model's maximum context length is "
            f"{self.longest_sequence} tokens (worker.max_model_len), and {detail}"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids.

        Raises OutOfRange if there are more ids than the context has tokens, or if an id is outside
        the vocabulary.
        """
        if len(ids) > self.longest_sequence:
            raise OutOfRange(
                f"{len(ids)} tokens are more than the context of {self.longest_sequence}",
                field="token_ids",
            )
        self._check_ids("token_ids", ids)
        return self.tokenizer.decode(ids)

    def _with_bad_words(self, submission: Submission) -> SamplingParams:
        """Return the sampling parameters with the token sequences of the submission's bad words.

        Raises InvalidRequest for a word without tokens.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in submission.bad_words:
            bare = word.lstrip(" ") or word
            for text in (bare, f" {bare}"):
                sequences[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
            if () in sequences:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens", field="bad_words")
        sampling = submission.sampling
        if not sequences:
            return sampling
        banned = dict.fromkeys((*sampling.banned_sequences, *sequences))
        return replace(sampling, banned_sequences=tuple(banned))

    def _check_sampling(self, sampling: SamplingParams, max_tokens: int) -> None:
        self._check_ids("logit_bias", tuple(token for token, _ in sampling.logit_bias))
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids)
        for sequence in sampling.banned_sequences:
            self._check_ids("banned_sequences", sequence)
        check_range("min_tokens", sampling.min_tokens, 0, max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            check_range(name, getattr(sampling, name) or 0, 0, self.vocab_size)

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        worst = max(ids, default=0)
        if worst >= self.vocab_size:
            raise OutOfRange(
                f"{name} contains the token id {worst}, but the vocabulary has only "
                f"{self.vocab_size} tokens",
                field=name,
            )


def _check_tokens_remain(sampling: SamplingParams, stops: Set[int], vocab_size: int) -> None:
    """Raise InvalidRequest if it is possible that no token may be sampled at some position."""
    if not sampling.has_restrictions:
        return
    banned = {sequence[-1] for sequence in sampling.banned_sequences}
    if sampling.min_tokens:
        banned |= stops
    allowed = sampling.allowed_token_ids
    num_left = len({*allowed} - banned) if allowed else vocab_size - len(banned)
    if num_left <= 0:
        raise InvalidRequest(
            f"{'allowed_token_ids' if allowed else 'bad_words'} may leave no token to sample: each "
            "allowed token is the last one of a bad word, or a stop token before min_tokens",
            field="allowed_token_ids" if allowed else "bad_words",
        )


def _check_same(what: str, before: str, now: str) -> None:
    """Raise UnknownModel if two known fingerprints differ."""
    if before and now and before != now:
        raise UnknownModel(
            f"{what} has changed since the request began: its fingerprint was {before} and is {now}"
        )


def _as_field(ids: Sequence[int]) -> Sequence[int]:
    field = pb.TokenIds().ids
    for start in range(0, len(ids), _IDS_PER_COPY):
        field.extend(ids[start : start + _IDS_PER_COPY])
    return field


def _capacity(worker: session_pb2.WorkerInfo) -> int:
    return min(worker.max_model_len, worker.num_blocks * BLOCK_SIZE)


def _check_total(num_prompt: int, max_tokens: int, context: int) -> None:
    """Raise ContextLengthExceeded if prompt and output together exceed ``context`` tokens."""
    if num_prompt + max_tokens > context:
        # Clients recognise this error by OpenAI's wording.
        raise ContextLengthExceeded(
            f"this model's maximum context length is {context} tokens. However, you requested "
            f"{num_prompt + max_tokens} tokens ({num_prompt} in the messages, {max_tokens} in the "
            "completion). Reduce max_tokens or the prompt",
            field="max_tokens",
        )


def _check_amount(submission: Submission, num_prompt: int, max_tokens: int) -> None:
    sampling, num_output = submission.sampling, submission.n * max_tokens
    for name, num_top, num_tokens, limit in (
        ("logprobs", sampling.logprobs, num_output, _MAX_LOGPROBS),
        ("prompt_logprobs", sampling.prompt_logprobs, num_prompt, _MAX_PROMPT_LOGPROBS),
    ):
        if num_top is not None and num_tokens * (1 + num_top) > limit:
            raise OutOfRange(
                f"{name} of {num_tokens} tokens with {num_top} alternatives each are too many; "
                f"at most {limit} log probabilities are returned for a request",
                field=name,
            )


def _sizes(config: Path) -> tuple[int, int]:
    """Return the vocabulary size and the context length in tokens that ``config`` states.

    Raises UnknownModel if the file is invalid.
    """
    try:
        facts = json.loads(config.read_text())
        facts = {**facts.get("text_config", {}), **facts}
        return _number(facts, ["vocab_size"], _UNBOUNDED), _context(facts)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise UnknownModel(f"{config} is not a valid model configuration") from None


def _number(facts: Mapping[str, Any], keys: Sequence[str], default: int) -> int:
    return next((int(facts[key]) for key in keys if facts.get(key) is not None), default)


def _context(facts: Mapping[str, Any]) -> int:
    """Return the context length in tokens that the configuration ``facts`` states.

    YaRN is the only method of extending a context (RoPE scaling) that is taken into account. All
    sections of the rope parameters are searched for YaRN, because Gemma has a section for each kind
    of layer.
    """
    written = _number(facts, _CONTEXT_KEYS, _UNBOUNDED)
    rope = facts.get("rope_scaling") or facts.get("rope_parameters")
    if not isinstance(rope, dict):
        return written
    sections = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    return max([written, *(_yarn_context({**part, **facts}, written) for part in sections)])


def _yarn_context(facts: Mapping[str, Any], written: int) -> int:
    if facts.get("rope_type", facts.get("type")) != "yarn":
        return 0
    original = _number(facts, ["original_max_position_embeddings"], written)
    return int((facts.get("factor") or 0) * original)


T = TypeVar("T")

#: Maximum length of a text that is processed in the event loop, in characters. The tokenizer takes
#: 1.2 ms for it, and handing work to a thread takes 0.1 ms. 100,000 characters would block all
#: streams for 41 ms.
_INLINE = 4096


async def with_text(length: int, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which runs in a thread if the text is long.

    ``length`` is the length of the text in characters or tokens. ``work`` must release Python's
    global interpreter lock, so that the event loop can continue. Its exceptions are raised here.
    """
    return work() if length <= _INLINE else await asyncio.to_thread(work)


async def with_json(value: object, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which runs in a thread if the JSON ``value`` is large.

    Its exceptions are raised here.
    """
    return await with_text(json_length(value, _INLINE), work)
