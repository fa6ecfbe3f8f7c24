"""Tree of errors, with one class for each cause that a caller can act on.

    EverliftError
    ├── InvalidRequest            the request can never succeed as it is
    │   ├── EmptyPrompt
    │   ├── PromptTooLong         the prompt has too many tokens
    │   │   └── PromptTextTooLong the prompt has so many characters that it was not tokenised
    │   ├── ContextLengthExceeded the prompt fits into the context, but not with max_tokens
    │   ├── NotUtf8               a text is not valid UTF-8
    │   ├── OutOfRange            the value of a parameter is out of range
    │   │   ├── TooManyChoices    n is too large
    │   │   ├── TooManyStops      too many stop strings or stop tokens, or too long a stop string
    │   │   ├── LogitBiasTooLarge
    │   │   ├── GrammarTooLarge   a grammar, such as a schema, is too long or lists too many texts
    │   │   └── TooManyRequests   one call contains too many requests
    │   ├── UnknownField          the JSON body has an unknown field
    │   ├── MalformedBody         the body is not JSON, or not JSON of an accepted form
    │   ├── BodyTooSlow           the rest of the body did not arrive in time
    │   ├── UnsupportedMediaType  the body is not application/json, or it is compressed
    │   ├── Unsupported           the feature is not supported
    │   ├── NoChatTemplate        the model has no chat template
    │   ├── InvalidGrammar        the grammar is invalid, or too slow to compile or to follow
    │   ├── UnsupportedContent    a message has a part that the model does not accept
    │   ├── ToolsUnsupported      the format in which the model calls tools is unknown
    │   ├── TemplateFailed        the model's chat template rejected the messages
    │   ├── TemplateTimeout       the model's chat template took too long for the messages
    │   ├── MessageTooLarge
    │   └── MetadataTooLarge
    ├── Unimplemented             the gRPC method does not exist, or is not served
    ├── UnknownPath               the HTTP path does not exist, or is not served
    │   └── MethodNotAllowed
    ├── Unauthenticated           the credential is missing or unknown
    ├── Forbidden                 the credential does not permit the call
    │   └── ChaosForbidden        the cluster was started without chaos
    ├── UnknownModel
    ├── UnknownRequest            the request was never seen, or its retention has passed
    │   └── ForgottenRequest      the request was erased by Forget
    ├── UnknownObject             the conversation or item was never created, or has expired
    ├── ConversationLocked        retry later: a response of the conversation has not finished
    ├── OffsetOutOfRange          Attach asked for an offset beyond the existing output
    ├── RequestConflict           the request id exists with a different body
    ├── QueueFull                 retry later: the admission queue is full
    │   └── Shed                  a request of a higher priority took the place in the full queue
    ├── QueueTimeout              retry later: the request was queued for the longest allowed time
    ├── DeadlineUnmeetable        retry later: the first token or the end would come too late
    ├── RateLimited               retry later: the tenant has used up its quota for now
    │   └── RetriedTooSoon        the client often retried before the time given by retry-after
    ├── LedgerFull                retry later: the ledger is short of memory
    ├── DeadlineExceeded
    ├── Cancelled
    ├── AttemptsExhausted         the workers of the request were lost too often
    ├── EngineFailed              the engine could not continue the request
    ├── LedgerUnavailable
    ├── NoWorker                  no worker was connected within the allowed time
    ├── UnknownWorker
    ├── TooManyConnections        the router has too many connections
    ├── RouterStopping            this router is draining: use another one, nothing is lost
    ├── Moved                     another router owns or discarded the request: call again
    ├── Unreachable               no router answers, or the owner of the request does not
    └── DataLoss                  acknowledged data is lost

The slug of an error names it in logs, in metrics and on the wire. This module does not depend on a
transport, so it names gRPC status codes as strings.
"""

from __future__ import annotations

from typing import ClassVar


class SettingsError(Exception):
    """Raised for invalid settings or settings files; the message has one line for each fault.

    A line about a setting contains the place where it was set (if known), its dotted path, and the
    cause. A line about a file begins with the file's path.
    """


class EverliftError(Exception):
    """Base class of the errors that clients receive.

    ``str(error)`` is the cause in words for the client. ``retry_after_s`` is the number of seconds
    after which a retry makes sense, or None if that is unknown. ``field`` is the name of the
    invalid field of the message or key of the metadata; it is empty if the error concerns no single
    field or key.
    """

    slug: ClassVar[str] = "internal"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __init__(
        self, message: str = "", *, retry_after_s: float | None = None, field: str = ""
    ) -> None:
        super().__init__(message or self.slug.replace("_", " "))
        self.retry_after_s = retry_after_s
        self.field = field


class InvalidRequest(EverliftError):
    slug = "invalid_request"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class EmptyPrompt(InvalidRequest):
    slug = "empty_prompt"


class PromptTooLong(InvalidRequest):
    slug = "prompt_too_long"


class PromptTextTooLong(PromptTooLong):
    slug = "prompt_text_too_long"


class ContextLengthExceeded(InvalidRequest):
    slug = "context_length_exceeded"


class NotUtf8(InvalidRequest):
    slug = "not_utf8"


class OutOfRange(InvalidRequest):
    slug = "out_of_range"


class TooManyChoices(OutOfRange):
    slug = "too_many_choices"


class TooManyStops(OutOfRange):
    slug = "too_many_stops"


class LogitBiasTooLarge(OutOfRange):
    slug = "logit_bias_too_large"


class GrammarTooLarge(OutOfRange):
    slug = "grammar_too_large"


class TooManyRequests(OutOfRange):
    slug = "too_many_requests"


class UnknownField(InvalidRequest):
    slug = "unknown_field"


class MalformedBody(InvalidRequest):
    slug = "malformed_body"


class BodyTooSlow(InvalidRequest):
    slug = "body_too_slow"
    http_status = 408


class UnsupportedMediaType(InvalidRequest):
    slug = "unsupported_media_type"
    http_status = 415


class Unsupported(InvalidRequest):
    slug = "unsupported"


class NoChatTemplate(InvalidRequest):
    slug = "no_chat_template"


class InvalidGrammar(InvalidRequest):
    slug = "invalid_grammar"


class UnsupportedContent(InvalidRequest):
    slug = "unsupported_content"


class ToolsUnsupported(InvalidRequest):
    slug = "tools_unsupported"


class TemplateFailed(InvalidRequest):
    slug = "template_error"


class TemplateTimeout(InvalidRequest):
    slug = "template_timeout"


class MessageTooLarge(InvalidRequest):
    slug = "message_too_large"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 413


class MetadataTooLarge(InvalidRequest):
    slug = "metadata_too_large"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 431


class Unimplemented(EverliftError):
    slug = "unimplemented"
    grpc_status = "UNIMPLEMENTED"
    http_status = 501


class Unauthenticated(EverliftError):
    slug = "unauthenticated"
    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class Forbidden(EverliftError):
    slug = "forbidden"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class UnknownPath(EverliftError):
    slug = "unknown_path"
    grpc_status = "UNIMPLEMENTED"
    http_status = 404


class MethodNotAllowed(UnknownPath):
    slug = "method_not_allowed"
    http_status = 405


class UnknownModel(EverliftError):
    slug = "unknown_model"
    grpc_status = "NOT_FOUND"
    http_status = 404


class UnknownRequest(EverliftError):
    slug = "unknown_request"
    grpc_status = "NOT_FOUND"
    http_status = 404


class ForgottenRequest(UnknownRequest):
    slug = "forgotten_request"


class UnknownObject(EverliftError):
    slug = "unknown_object"
    grpc_status = "NOT_FOUND"
    http_status = 404


class ConversationLocked(EverliftError):
    slug = "conversation_locked"
    grpc_status = "ABORTED"
    http_status = 409


class OffsetOutOfRange(EverliftError):
    slug = "offset_out_of_range"
    grpc_status = "OUT_OF_RANGE"
    http_status = 416


class RequestConflict(EverliftError):
    slug = "request_conflict"
    grpc_status = "ALREADY_EXISTS"
    http_status = 409


class QueueFull(EverliftError):
    slug = "queue_full"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429


class Shed(QueueFull):
    slug = "shed"


class QueueTimeout(EverliftError):
    slug = "queue_timeout"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429


class DeadlineUnmeetable(EverliftError):
    slug = "deadline_unmeetable"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429


class RateLimited(EverliftError):
    slug = "rate_limited"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429


class RetriedTooSoon(RateLimited):
    slug = "retried_too_soon"


class LedgerFull(EverliftError):
    slug = "ledger_full"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429


class DeadlineExceeded(EverliftError):
    slug = "deadline_exceeded"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(EverliftError):
    slug = "cancelled"
    grpc_status = "CANCELLED"
    http_status = 499


class AttemptsExhausted(EverliftError):
    slug = "attempts_exhausted"


class EngineFailed(EverliftError):
    slug = "engine_failed"


class LedgerUnavailable(EverliftError):
    slug = "ledger_unavailable"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class NoWorker(EverliftError):
    slug = "no_worker"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class UnknownWorker(EverliftError):
    slug = "unknown_worker"
    grpc_status = "NOT_FOUND"
    http_status = 404


class ChaosForbidden(Forbidden):
    slug = "chaos_forbidden"


class TooManyConnections(EverliftError):
    slug = "too_many_connections"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class RouterStopping(EverliftError):
    slug = "router_stopping"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class Moved(EverliftError):
    slug = "moved"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class Unreachable(EverliftError):
    slug = "unreachable"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class DataLoss(EverliftError):
    slug = "data_loss"
    grpc_status = "DATA_LOSS"


def _tree(cls: type[EverliftError]) -> list[type[EverliftError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in _tree(child))]


BY_SLUG: dict[str, type[EverliftError]] = {cls.slug: cls for cls in _tree(EverliftError)}


def from_slug(slug: str, message: str) -> EverliftError:
    """Return an error of the class with the slug ``slug``, whose text is ``message``.

    If no class has this slug, the error is an EverliftError, because a newer peer may send slugs
    that this version does not know.
    """
    return BY_SLUG.get(slug, EverliftError)(message)
