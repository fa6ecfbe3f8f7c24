"""What a process that simulates is told, and what it answers: a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict

from everlift import settings
from everlift.errors import EverliftError, from_slug
from everlift.v1 import admin_pb2
from router.config import RouterConfig
from router.gateway.what_if import Estimates, NoEstimate, Question
from router.ledger.config import LedgerConfig

Answer = Estimates | NoEstimate | EverliftError


@dataclass(frozen=True, slots=True)
class Launch:
    """The question is answered from this ledger."""

    #: with the password in its url: goes over a pipe, never by command line or environment
    ledger: LedgerConfig
    question: Question


def encode(launch: Launch) -> bytes:
    question = launch.question
    told = {
        "ledger": settings.to_dict(launch.ledger),
        "request_id": question.request_id,
        "policies": {name: settings.to_dict(it) for name, it in question.policies.items()},
        "kinds": [MessageToDict(kind, preserving_proto_field_name=True) for kind in question.kinds],
    }
    return json.dumps(told).encode()


def decode(line: str) -> Launch:
    """Raises SettingsError, ValueError."""
    told = json.loads(line)
    question = Question(
        told["request_id"],
        {name: settings.load(RouterConfig, it) for name, it in told["policies"].items()},
        [ParseDict(kind, admin_pb2.WorkerKind()) for kind in told["kinds"]],
    )
    return Launch(settings.load(LedgerConfig, told["ledger"]), question)


def encode_answer(answer: Answer) -> str:
    match answer:
        case Estimates():
            return json.dumps({"estimates": asdict(answer)})
        case NoEstimate():
            return json.dumps({"cause": str(answer)})
        case EverliftError():
            return json.dumps({"slug": answer.slug, "message": str(answer)})


def decode_answer(line: bytes) -> Estimates:
    """Raises NoEstimate, what else it answers, and EverliftError where it answered nothing."""
    answer: Mapping[str, Any] = json.loads(line) if line else {}
    match answer:
        case {"estimates": dict(estimates)}:
            return Estimates(**estimates)
        case {"cause": str(cause)}:
            raise NoEstimate(cause)
        case {"slug": str(slug), "message": str(message)}:
            raise from_slug(slug, message)
    raise EverliftError("the simulation ended without an answer: the router's log says more")
