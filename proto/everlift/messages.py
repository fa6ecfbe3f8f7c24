"""Requests of clients: ``Submission`` as received, and ``Request`` as the cluster runs it.

A ``Submission`` is checked on construction, so that every instance is valid. A ``Request`` is a
submission with every default resolved for the served model, the prompt tokenised and the seed
chosen. The ledger stores the ``Request``. After a failure, the request can be continued from the
stored ``Request`` and the tokens generated so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Self

from everlift import sampling
from everlift.checks import Range, limit_plus_one
from everlift.errors import (
    EmptyPrompt,
    InvalidRequest,
    OutOfRange,
    TooManyChoices,
    TooManyStops,
    Unsupported,
)
from everlift.hashes import session_key
from everlift.images import MAX_IMAGES, MAX_PIXELS_OF_REQUEST, Image
from everlift.request_id import check_qualified, tenant_of
from everlift.sampling import SamplingParams
from everlift.trace_context import TraceContext
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import ledger_pb2

#: Maximum number of requests in one call. Clients send, and routers accept, at most this many.
MAX_REQUESTS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 128
MAX_N = 128
MAX_CACHE_SALT_BYTES = 128
#: Maximum length of session_id, fairness_id and application.
MAX_LABEL_BYTES = 128
MAX_ATTACHMENT_BYTES = 4 << 20
#: Number of token ids that are copied at once; between two copies, other threads can run.
_IDS_PER_COPY = 1 << 14
MAX_TIMEOUT_S = 7 * 24 * 3600.0
MAX_PRIORITY = 10
#: Lowest priority class, that of batches. It has no share of the work of higher classes, so its
#: requests run only while no other request can.
BATCH_PRIORITY = -MAX_PRIORITY

#: Valid ranges of a request's numeric fields. They are the same in every API.
RANGES: Mapping[str, Range] = {
    **sampling.RANGES,
    "max_tokens": Range(1, 1 << 30),
    "n": Range(1, MAX_N),
    "best_of": Range(0, MAX_N),
    "priority": Range(-MAX_PRIORITY, MAX_PRIORITY),
    "timeout_ms": Range(1, round(MAX_TIMEOUT_S * 1e3)),
    "ttft_target_ms": Range(1, round(MAX_TIMEOUT_S * 1e3)),
    "stop_token_ids": Range(0, (1 << 32) - 1),
    # -1 means what the context leaves; 0 is refused as well.
    "truncate_prompt_tokens": Range(-1, 1 << 30),
}


def check_field(field: str, value: float, name: str = "") -> None:
    """Raise OutOfRange unless ``value`` is in the range of the numeric field ``field``.

    ``field`` is a key of RANGES, and ``name`` is its name in the client's API, if that differs.
    Raises TooManyChoices, a subclass of OutOfRange, if the value of the field "n" is too large.
    """
    try:
        RANGES[field].check(name or field, value)
    except OutOfRange as error:
        if field == "n" and value > MAX_N:
            raise TooManyChoices(str(error), field=error.field) from None
        raise


class OnDisconnect(Enum):
    #: the request is cancelled when its last client disconnects
    CANCEL = pb.ON_DISCONNECT_CANCEL
    #: the request continues for the router's grace period, and is then cancelled unless a client
    #: has attached
    GRACE = pb.ON_DISCONNECT_GRACE
    #: the request continues to its end
    CONTINUE = pb.ON_DISCONNECT_CONTINUE


class FinishReason(Enum):
    #: an end-of-sequence token, a stop token or a stop string was reached
    STOP = pb.FINISH_REASON_STOP
    #: max_tokens was reached, or the context is full
    LENGTH = pb.FINISH_REASON_LENGTH


@dataclass(frozen=True, slots=True)
class Submission:
    """Request as the client sent it, checked as far as possible without the model.

    ``max_tokens`` and ``timeout_s`` are None if the client set none. ``clamp_max_tokens`` lowers
    ``max_tokens`` to the number of tokens that the prompt leaves in the context.
    ``body_hash`` (``hash_body``) is the hash of the fields in which all submissions of a request
    must agree. The hash distinguishes a repeated request from another request with the same id.
    ``request_id`` is prefixed with the tenant's name, if tenants are distinguished (request_id.py).
    ``x_request_id`` is the id of the call in other systems' logs and traces; Everlift does not
    identify requests by it. ``session_id`` names the conversation. Later prompts of a conversation
    reuse the token ids of earlier prompts, and the admission queue may order requests by
    conversation. ``fairness_id`` is a label that is only recorded in traces. ``application`` names
    the purpose of the request, from which the length of the output is predicted.
    ``add_special_tokens`` makes the tokenizer add its special tokens to a prompt that is a text.
    ``keep_special_tokens`` includes special tokens in the text of the output. ``attachment`` is
    data that an API adds to its request; the ledger stores it without interpreting it. Only the
    last ``truncate_prompt_tokens`` tokens of the prompt are used; None means all, and -1 as many as
    the context leaves beside the output. ``bad_words`` are texts whose token sequences the output
    must not contain. ``adapter`` is the LoRA adapter that ``model`` names; it is empty for the
    model itself. ``adapter_digest`` identifies the adapter's files; it is empty if they are not
    known yet. ``images`` are in the order of their placeholders in the prompt.

    The constructor raises InvalidRequest if a field is invalid.
    """

    request_id: str
    model: str
    prompt: str | tuple[int, ...]
    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    on_disconnect: OnDisconnect
    timeout_s: float | None
    body_hash: bytes
    n: int = 1
    include_stop: bool = False
    cache_salt: str = ""
    priority: int = 0
    ttft_target_s: float | None = None
    trace: TraceContext | None = None
    session_id: str = ""
    fairness_id: str = ""
    x_request_id: str = ""
    application: str = ""
    clamp_max_tokens: bool = False
    add_special_tokens: bool = True
    keep_special_tokens: bool = False
    attachment: bytes = b""
    truncate_prompt_tokens: int | None = None
    bad_words: tuple[str, ...] = ()
    adapter: str = ""
    adapter_digest: str = ""
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        check_qualified(self.request_id)
        check_field("priority", self.priority)
        check_field("n", self.n)
        if not self.prompt:
            raise EmptyPrompt("the prompt is empty", field="prompt")
        if self.max_tokens is not None:
            check_field("max_tokens", self.max_tokens)
        if self.timeout_s is not None:
            check_field("timeout_ms", round(self.timeout_s * 1e3))
        if self.ttft_target_s is not None:
            check_field("ttft_target_ms", round(self.ttft_target_s * 1e3))
        if self.truncate_prompt_tokens is not None:
            _check_truncation(self.truncate_prompt_tokens)
        if self.images:
            self._check_images()
        self._check_restrictions()
        _check_stops(self.stop)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise TooManyStops(
                f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} tokens", field="stop_token_ids"
            )
        _check_bytes("cache_salt", self.cache_salt, MAX_CACHE_SALT_BYTES)
        _check_bytes("session_id", self.session_id, MAX_LABEL_BYTES)
        _check_bytes("fairness_id", self.fairness_id, MAX_LABEL_BYTES)
        _check_bytes("application", self.application, MAX_LABEL_BYTES)
        if len(self.attachment) > MAX_ATTACHMENT_BYTES:
            raise OutOfRange(
                f"attachment is longer than {MAX_ATTACHMENT_BYTES} bytes", field="attachment"
            )

    def _check_images(self) -> None:
        if len(self.images) > MAX_IMAGES:
            raise OutOfRange(f"the request has more than {MAX_IMAGES} images", field="images")
        if (num_pixels := sum(image.num_pixels for image in self.images)) > MAX_PIXELS_OF_REQUEST:
            raise OutOfRange(
                f"the images have {num_pixels} pixels; at most {MAX_PIXELS_OF_REQUEST} are allowed "
                "together",
                field="images",
            )
        # Workers put several tokens in the place of each placeholder.
        for name, value in (
            ("truncate_prompt_tokens", self.truncate_prompt_tokens),
            ("prompt_logprobs", self.sampling.prompt_logprobs),
        ):
            if value is not None:
                raise Unsupported(f"{name} cannot be combined with images", field=name)

    def _check_restrictions(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise OutOfRange(f"bad_words has more than {MAX_BAD_WORDS} words", field="bad_words")
        for word in self.bad_words:
            if not word:
                raise InvalidRequest("a word of bad_words is empty", field="bad_words")
            if len(word.encode()) > MAX_BAD_WORD_BYTES:
                raise OutOfRange(
                    f"a word of bad_words is longer than {MAX_BAD_WORD_BYTES} bytes",
                    field="bad_words",
                )
        sampling = self.sampling
        if sampling.grammar is not None and (sampling.has_restrictions or self.bad_words):
            # Together they could leave no token in the middle of the output.
            name = "allowed_token_ids" if sampling.allowed_token_ids else "bad_words"
            raise InvalidRequest(
                f"{name} cannot be combined with a required form of the output (a grammar or a "
                "required tool call)",
                field=name,
            )

    @property
    def salt(self) -> bytes:
        """Return the salt of the request's block hashes.

        The salt depends on tenant, cache_salt and adapter, and is empty without them. Requests
        share cached KV blocks only if their salts are equal. Tenants never share blocks, because
        timing would reveal the prompts of other tenants. The versions of an adapter have different
        salts, because each one computes other keys and values.
        """
        tenant, salt = tenant_of(self.request_id), b""
        if self.cache_salt or tenant:
            salt = hashlib.sha256(f"{tenant}/{self.cache_salt}".encode()).digest()
        if self.adapter:
            # No text of a tenant and a salt begins with this byte.
            names = self.adapter.encode(), self.adapter_digest.encode(), salt
            salt = hashlib.sha256(b"\0" + b"\0".join(names)).digest()
        return salt

    @classmethod
    def from_proto(
        cls,
        message: pb.GenerateRequest,
        request_id: str,
        seed: int,
        trace: TraceContext | None = None,
        x_request_id: str = "",
        sampling_defaults: SamplingParams | None = None,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:
        """Return the submission that ``message`` describes.

        ``request_id`` is the id with the tenant's name. ``seed`` and ``sampling_defaults`` are
        used for sampling parameters that the message does not set. ``adapters`` has the digests
        of the model's adapters by name. Raises InvalidRequest if a field is invalid.
        """
        _check_best_of(message)
        submission = cls(
            request_id=request_id,
            model=message.model,
            prompt=_prompt(message),
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            sampling=SamplingParams.from_proto(message.sampling, seed, sampling_defaults),
            stop=limit_plus_one(message.stop, MAX_STOP_STRINGS),
            stop_token_ids=limit_plus_one(message.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ignore_eos=message.ignore_eos,
            on_disconnect=_on_disconnect(message.on_disconnect),
            timeout_s=_seconds(message, "timeout_ms"),
            body_hash=b"",
            n=_num_choices(message),
            include_stop=message.include_stop,
            cache_salt=message.cache_salt,
            priority=message.priority,
            ttft_target_s=_seconds(message, "ttft_target_ms"),
            trace=trace,
            session_id=message.session_id,
            fairness_id=message.fairness_id,
            application=message.application,
            x_request_id=x_request_id,
            clamp_max_tokens=message.clamp_max_tokens,
            add_special_tokens=(
                message.add_special_tokens if message.HasField("add_special_tokens") else True
            ),
            keep_special_tokens=message.keep_special_tokens,
            attachment=message.attachment,
            truncate_prompt_tokens=(
                message.truncate_prompt_tokens
                if message.HasField("truncate_prompt_tokens")
                else None
            ),
            bad_words=limit_plus_one(message.bad_words, MAX_BAD_WORDS),
            adapter=message.model if message.model in adapters else "",
            adapter_digest=adapters.get(message.model, ""),
            images=tuple(
                Image.checked(data, f"images[{index}]")
                for index, data in enumerate(limit_plus_one(message.images, MAX_IMAGES))
            ),
        )
        # The body is hashed after the checks, so that a list that is too long is never hashed.
        object.__setattr__(submission, "body_hash", hash_body(message))
        return submission


def _seconds(message: pb.GenerateRequest, field: str) -> float | None:
    return getattr(message, field) / 1e3 if message.HasField(field) else None  # type: ignore[arg-type]


def _check_truncation(num_tokens: int) -> None:
    check_field("truncate_prompt_tokens", num_tokens)
    if num_tokens == 0:
        raise OutOfRange(
            "truncate_prompt_tokens must be -1 or at least 1, not 0",
            field="truncate_prompt_tokens",
        )


def _check_best_of(message: pb.GenerateRequest) -> None:
    check_field("best_of", message.best_of)
    if message.best_of > _num_choices(message):
        raise OutOfRange(
            "best_of above n is not supported, because its output could not be streamed: request "
            "n choices with logprobs, and select the best one",
            field="best_of",
        )


def _num_choices(message: pb.GenerateRequest) -> int:
    return message.n if message.HasField("n") else 1


def _prompt(message: pb.GenerateRequest) -> str | tuple[int, ...]:
    if message.WhichOneof("prompt") != "tokens":
        return message.text
    field, ids = message.tokens.ids, list[int]()
    for start in range(0, len(field), _IDS_PER_COPY):
        ids += field[start : start + _IDS_PER_COPY]
    return tuple(ids)


def _on_disconnect(value: int) -> OnDisconnect:
    if value == pb.ON_DISCONNECT_UNSPECIFIED:
        return OnDisconnect.CANCEL
    try:
        return OnDisconnect(value)
    except ValueError:
        raise OutOfRange(f"on_disconnect {value} is unknown", field="on_disconnect") from None


def _check_bytes(name: str, text: str, limit: int) -> None:
    if len(text.encode()) > limit:
        raise OutOfRange(f"{name} is longer than {limit} bytes", field=name)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise TooManyStops(f"stop has more than {MAX_STOP_STRINGS} strings", field="stop")
    for stop in stops:
        if not stop:
            raise InvalidRequest("a stop string is empty", field="stop")
        if len(stop.encode()) > MAX_STOP_BYTES:
            raise TooManyStops(f"a stop string is longer than {MAX_STOP_BYTES} bytes", field="stop")


def hash_body(message: pb.GenerateRequest) -> bytes:
    """Return the SHA-256 of the fields in which two submissions of a request must agree.

    These are all fields of ``message`` except request_id, timeout_ms, on_disconnect, priority,
    ttft_target_ms, explain, session_id, fairness_id, application and attachment.
    """
    body = pb.GenerateRequest()
    body.CopyFrom(message)
    body.DiscardUnknownFields()
    # These fields may differ between two submissions of the same request.
    for name in ("request_id", "timeout_ms", "on_disconnect", "priority", "ttft_target_ms"):
        body.ClearField(name)
    body.ClearField("explain")  # it affects only the answer of one call
    for label in ("session_id", "fairness_id", "application", "attachment"):
        body.ClearField(label)
    return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()


@dataclass(frozen=True, slots=True)
class Request:
    """Request with every default resolved, as the cluster runs it.

    ``fingerprint`` identifies the model's files, which are the same at all workers. ``deadline`` is
    a time of the ledger's clock in seconds, or None if there is none. ``ttft_target_s`` counts from
    the request's arrival. ``salt`` is the salt of the block hashes: requests share cached KV blocks
    only if their salts are equal. ``stop_token_ids`` includes the model's ``eos_token_ids``, unless
    the client ignores them; then ``eos_token_ids`` is empty. The ``n`` choices may have up to
    ``max_tokens`` tokens each. ``clamp_max_tokens`` lets an output also end when the worker's
    context is full. ``trace`` is the request's own span, whose parent is the client's span, if any.
    ``chunks`` are the ids of the prompt's chunks if dispatch considers cached prefixes, else empty.
    ``chunk_hashes`` are the chunks' hashes (hashes.py) if they were computed, else empty. The
    ledger stores neither of the two. ``turn`` has digests of the prompt's text, by which later
    prompts of the session are recognised (``PromptMark`` of the router). An empty ``turn`` means
    that they cannot be recognised, for example without a session or a text. ``prompt_field`` has
    the ``prompt_ids`` as a field of a protobuf message, from which other messages copy them faster
    than from a tuple; it may be empty. ``adapter`` is the name of the LoRA adapter, if the request
    names one. ``adapter_digest`` identifies the adapter's files, as ``fingerprint`` identifies the
    model's. ``adapter_source`` gives their location in the text form of AdapterSource,
    NAME=LOCATION; it is empty if unknown. ``images`` are in the order of their placeholders in the
    prompt.
    """

    request_id: str
    model: str
    fingerprint: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    on_disconnect: OnDisconnect
    deadline: float | None
    body_hash: bytes
    salt: bytes = b""
    n: int = 1
    include_stop: bool = False
    priority: int = 0
    ttft_target_s: float | None = None
    trace: TraceContext | None = None
    session_id: str = ""
    fairness_id: str = ""
    x_request_id: str = ""
    application: str = ""
    clamp_max_tokens: bool = False
    eos_token_ids: tuple[int, ...] = ()
    keep_special_tokens: bool = False
    attachment: bytes = b""
    turn: bytes = b""
    adapter: str = ""
    adapter_digest: str = ""
    adapter_source: str = ""
    images: tuple[Image, ...] = ()
    chunks: tuple[int, ...] = field(default=(), compare=False)
    chunk_hashes: tuple[bytes, ...] = field(default=(), compare=False)
    prompt_field: Sequence[int] = field(default=(), compare=False, repr=False)

    @property
    def session(self) -> int:
        """64-bit number of the tenant's session; 0 without one."""
        return session_key(tenant_of(self.request_id), self.session_id)

    @property
    def num_image_bytes(self) -> int:
        return sum(len(image.data) for image in self.images)

    @property
    def served_model(self) -> str:
        """Name of the adapter or, without one, of the model."""
        return self.adapter or self.model

    def to_bytes(self, prompt_offset: int = 0) -> bytes:
        """Return a serialised StoredRequest with the prompt's tokens from ``prompt_offset`` on.

        The message has the digests of the images, but not their files.
        """
        return ledger_pb2.StoredRequest(
            request_id=self.request_id,
            model=self.model,
            fingerprint=self.fingerprint,
            prompt_ids=self.prompt_ids[prompt_offset:],
            max_tokens=self.max_tokens,
            sampling=self.sampling.to_proto(),
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            on_disconnect=self.on_disconnect.value,
            deadline=self.deadline,
            body_hash=self.body_hash,
            salt=self.salt,
            n=self.n,
            include_stop=self.include_stop,
            priority=self.priority,
            ttft_target_s=self.ttft_target_s,
            trace=self.trace.to_proto() if self.trace else None,
            session_id=self.session_id,
            fairness_id=self.fairness_id,
            x_request_id=self.x_request_id,
            application=self.application,
            clamp_max_tokens=self.clamp_max_tokens,
            eos_token_ids=self.eos_token_ids,
            keep_special_tokens=self.keep_special_tokens,
            attachment=self.attachment,
            turn=self.turn,
            adapter=self.adapter,
            adapter_digest=self.adapter_digest,
            adapter_source=self.adapter_source,
            image_digests=[image.digest for image in self.images],
        ).SerializeToString()

    @classmethod
    def from_bytes(
        cls, data: bytes, prompt_start: tuple[int, ...] = (), images: Sequence[bytes] = ()
    ) -> Self:
        """Return the request from ``data``, a StoredRequest that ``to_bytes`` serialised.

        ``prompt_start`` has the prompt's tokens that precede those in ``data``. ``images`` has the
        contents of the image files, in the order of the stored digests. Raises ValueError if the
        numbers of files and digests differ, and protobuf's DecodeError if ``data`` is malformed.
        """
        stored = ledger_pb2.StoredRequest.FromString(data)
        return cls(
            request_id=stored.request_id,
            model=stored.model,
            fingerprint=stored.fingerprint,
            prompt_ids=prompt_start + tuple(stored.prompt_ids),
            max_tokens=stored.max_tokens,
            sampling=SamplingParams.from_proto(stored.sampling, seed=0),
            stop=tuple(stored.stop),
            stop_token_ids=tuple(stored.stop_token_ids),
            on_disconnect=OnDisconnect(stored.on_disconnect),
            deadline=stored.deadline if stored.HasField("deadline") else None,
            body_hash=stored.body_hash,
            salt=stored.salt,
            n=stored.n,
            include_stop=stored.include_stop,
            priority=stored.priority,
            ttft_target_s=stored.ttft_target_s if stored.HasField("ttft_target_s") else None,
            trace=TraceContext.from_proto(stored.trace) if stored.HasField("trace") else None,
            session_id=stored.session_id,
            fairness_id=stored.fairness_id,
            x_request_id=stored.x_request_id,
            application=stored.application,
            clamp_max_tokens=stored.clamp_max_tokens,
            eos_token_ids=tuple(stored.eos_token_ids),
            keep_special_tokens=stored.keep_special_tokens,
            attachment=stored.attachment,
            turn=stored.turn,
            adapter=stored.adapter,
            adapter_digest=stored.adapter_digest,
            adapter_source=stored.adapter_source,
            images=tuple(
                Image(digest, image)
                for digest, image in zip(stored.image_digests, images, strict=True)
            ),
        )
