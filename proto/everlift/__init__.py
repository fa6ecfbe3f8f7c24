"""Everlift's client library and wire contract: all that a customer imports."""

from everlift.blocking import BlockingStream, Client
from everlift.client import AsyncClient, GenerateOptions
from everlift.errors import (
    AttemptsExhausted,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    EmptyPrompt,
    EngineFailed,
    EverliftError,
    InvalidGrammar,
    InvalidRequest,
    LedgerUnavailable,
    Moved,
    NotUtf8,
    OffsetOutOfRange,
    OutOfRange,
    PromptTooLong,
    QueueFull,
    RequestConflict,
    RouterStopping,
    UnknownModel,
    UnknownRequest,
    Unreachable,
)
from everlift.messages import FinishReason, OnDisconnect
from everlift.sampling import TokenLogprobs
from everlift.stream import Chunk, Stream

__all__ = [
    "AsyncClient",
    "AttemptsExhausted",
    "BlockingStream",
    "Cancelled",
    "Chunk",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "EmptyPrompt",
    "EngineFailed",
    "EverliftError",
    "FinishReason",
    "GenerateOptions",
    "InvalidGrammar",
    "InvalidRequest",
    "LedgerUnavailable",
    "Moved",
    "NotUtf8",
    "OffsetOutOfRange",
    "OnDisconnect",
    "OutOfRange",
    "PromptTooLong",
    "QueueFull",
    "RequestConflict",
    "RouterStopping",
    "Stream",
    "TokenLogprobs",
    "UnknownModel",
    "UnknownRequest",
    "Unreachable",
]
