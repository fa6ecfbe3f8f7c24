"""The error tree: one class a cause that a caller can act on.

    EverliftError
    ├── InvalidRequest            the request can never work as it is
    │   ├── EmptyPrompt
    │   ├── PromptTooLong         in tokens
    │   │   └── PromptTextTooLong in characters: it was not even tokenised
    │   ├── ContextLengthExceeded the prompt fits, but not together with max_tokens
    │   ├── NotUtf8
    │   ├── OutOfRange            a parameter's value
    │   │   ├── TooManyChoices    n
    │   │   ├── TooManyStops      stop strings, their bytes, or stop tokens
    │   │   ├── LogitBiasTooLarge
    │   │   ├── GrammarTooLarge   a schema, another grammar, or its choices
    │   │   └── TooManyRequests   of one call
    │   ├── UnknownField          of a body in JSON
    │   ├── MalformedBody         no JSON, or none that is taken
    │   ├── BodyTooSlow           the rest of it did not come
    │   ├── UnsupportedMediaType  a body in something else than JSON
    │   ├── Unsupported           a feature that is not served
    │   ├── NoChatTemplate        the model does not say how a chat is written
    │   ├── InvalidGrammar        no output can be kept to it
    │   ├── UnsupportedContent    a message has a part that is no text
    │   ├── ToolsUnsupported      how this model calls tools is not known
    │   ├── TemplateFailed        the model's chat template refuses the messages
    │   ├── TemplateTimeout       the same: it takes too long over them
    │   ├── MessageTooLarge
    │   └── MetadataTooLarge
    ├── Unimplemented             no such method, or one that is not served here
    ├── UnknownPath               the same over HTTP
    │   └── MethodNotAllowed
    ├── Unauthenticated           no credential, or none that is known
    ├── Forbidden                 the credential is not for this
    │   └── ChaosForbidden        the cluster was started without chaos
    ├── UnknownModel
    ├── UnknownRequest            never seen, or past its retention
    │   └── ForgottenRequest      erased by Forget
    ├── OffsetOutOfRange          Attach beyond what exists
    ├── RequestConflict           the request id is taken by another body
    ├── QueueFull                 try again later
    │   └── Shed                  a higher class has its place
    ├── QueueTimeout              the same: it has waited for as long as it may
    ├── DeadlineUnmeetable        the same: its first token or its end would come too late
    ├── RateLimited               the same: the tenant has had its share for now
    │   └── RetriedTooSoon        before the time that it was told, and often
    ├── LedgerFull                the same: the ledger's memory is short
    ├── DeadlineExceeded
    ├── Cancelled
    ├── AttemptsExhausted         its workers were lost too often
    ├── EngineFailed              the engine could not go on with it
    ├── LedgerUnavailable
    ├── NoWorker                  it waited for one, and none came
    ├── UnknownWorker
    ├── TooManyConnections        of one router
    ├── RouterStopping            this replica drains: go to another one, nothing is lost
    ├── Moved                     another router owns the request: attach again
    ├── Unreachable               no router answers: what the client itself finds
    └── DataLoss                  what was acknowledged is gone

One slug serves log, metric and wire. This module knows no transport: it names gRPC codes as words.
"""

from __future__ import annotations

from typing import ClassVar


class SettingsError(Exception):
    """Wrong settings, a line each: where it is set, if that is known, its path, and the cause."""


class EverliftError(Exception):
    """An answer that is not a result. ``str(error)`` is the cause in words for the client.

    A retry makes sense after ``retry_after_s`` seconds, None where nothing says when. ``field`` is
    what of a request is wrong, by its name in the message or by that of the metadata; empty where
    it is no single one.
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
    """Return the error that ``slug`` names; an unknown slug becomes an EverliftError.

    A newer peer may send one.
    """
    return BY_SLUG.get(slug, EverliftError)(message)
