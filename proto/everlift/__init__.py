"""Everlift's client library, its wire protocol, and modules that all packages share.

Client programs import the names in ``__all__``; tests of client programs import
``everlift.testing``. Each name is loaded when it is first used (PEP 562), so that a process that
needs only ``everlift.logs`` does not load grpc.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everlift.client.blocking import BlockingManyStream, BlockingStream, Client
    from everlift.client.client import AsyncClient
    from everlift.client.generate_many import ManyStream, Outcome
    from everlift.client.received_output import Chunk
    from everlift.client.stream import Stream
    from everlift.errors import (
        AttemptsExhausted,
        BodyTooSlow,
        Cancelled,
        ChaosForbidden,
        ContextLengthExceeded,
        ConversationLocked,
        DataLoss,
        DeadlineExceeded,
        DeadlineUnmeetable,
        EmptyPrompt,
        EngineFailed,
        EverliftError,
        Forbidden,
        ForgottenRequest,
        GrammarTooLarge,
        InvalidGrammar,
        InvalidRequest,
        LedgerFull,
        LedgerUnavailable,
        LogitBiasTooLarge,
        MalformedBody,
        MessageTooLarge,
        MetadataTooLarge,
        MethodNotAllowed,
        Moved,
        NoChatTemplate,
        NotUtf8,
        NoWorker,
        OffsetOutOfRange,
        OutOfRange,
        PromptTextTooLong,
        PromptTooLong,
        QueueFull,
        QueueTimeout,
        RateLimited,
        RequestConflict,
        RetriedTooSoon,
        RouterStopping,
        Shed,
        TemplateFailed,
        TemplateTimeout,
        ToolsUnsupported,
        TooManyChoices,
        TooManyConnections,
        TooManyRequests,
        TooManyStops,
        Unauthenticated,
        Unimplemented,
        UnknownField,
        UnknownModel,
        UnknownObject,
        UnknownPath,
        UnknownRequest,
        UnknownWorker,
        Unreachable,
        Unsupported,
        UnsupportedContent,
        UnsupportedMediaType,
    )
    from everlift.messages import FinishReason, OnDisconnect
    from everlift.options import GenerateOptions
    from everlift.sampling import TokenLogprobs
    from everlift.tls import Tls

__all__ = [
    "AsyncClient",
    "AttemptsExhausted",
    "BlockingManyStream",
    "BlockingStream",
    "BodyTooSlow",
    "Cancelled",
    "ChaosForbidden",
    "Chunk",
    "Client",
    "ContextLengthExceeded",
    "ConversationLocked",
    "DataLoss",
    "DeadlineExceeded",
    "DeadlineUnmeetable",
    "EmptyPrompt",
    "EngineFailed",
    "EverliftError",
    "FinishReason",
    "Forbidden",
    "ForgottenRequest",
    "GenerateOptions",
    "GrammarTooLarge",
    "InvalidGrammar",
    "InvalidRequest",
    "LedgerFull",
    "LedgerUnavailable",
    "LogitBiasTooLarge",
    "MalformedBody",
    "ManyStream",
    "MessageTooLarge",
    "MetadataTooLarge",
    "MethodNotAllowed",
    "Moved",
    "NoChatTemplate",
    "NoWorker",
    "NotUtf8",
    "OffsetOutOfRange",
    "OnDisconnect",
    "OutOfRange",
    "Outcome",
    "PromptTextTooLong",
    "PromptTooLong",
    "QueueFull",
    "QueueTimeout",
    "RateLimited",
    "RequestConflict",
    "RetriedTooSoon",
    "RouterStopping",
    "Shed",
    "Stream",
    "TemplateFailed",
    "TemplateTimeout",
    "Tls",
    "TokenLogprobs",
    "TooManyChoices",
    "TooManyConnections",
    "TooManyRequests",
    "TooManyStops",
    "ToolsUnsupported",
    "Unauthenticated",
    "Unimplemented",
    "UnknownField",
    "UnknownModel",
    "UnknownObject",
    "UnknownPath",
    "UnknownRequest",
    "UnknownWorker",
    "Unreachable",
    "Unsupported",
    "UnsupportedContent",
    "UnsupportedMediaType",
]

#: Modules of the public names that are not in ``everlift.errors``.
_MODULES = {
    "AsyncClient": "everlift.client.client",
    "BlockingManyStream": "everlift.client.blocking",
    "BlockingStream": "everlift.client.blocking",
    "Chunk": "everlift.client.received_output",
    "Client": "everlift.client.blocking",
    "FinishReason": "everlift.messages",
    "GenerateOptions": "everlift.options",
    "ManyStream": "everlift.client.generate_many",
    "OnDisconnect": "everlift.messages",
    "Outcome": "everlift.client.generate_many",
    "Stream": "everlift.client.stream",
    "Tls": "everlift.tls",
    "TokenLogprobs": "everlift.sampling",
}


def __getattr__(name: str) -> object:
    """Import the public name ``name``, and return its value.

    Raises:
        AttributeError: The package has no such name.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES.get(name, "everlift.errors")), name)
    globals()[name] = value
    return value
