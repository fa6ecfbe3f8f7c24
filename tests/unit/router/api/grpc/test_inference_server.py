"""Messages that Everlift's own gRPC API refuses."""

from __future__ import annotations

from typing import Any

import pytest

from everlift.errors import EverliftError, InvalidRequest
from everlift.v1 import inference_pb2 as pb
from router.api.grpc.inference_server import InferenceServer

ATTACHED = pb.GenerateRequest(text="a", attachment=b"R")


class Inference:
    """Inference that counts rejected submissions, and receives no others."""

    def __init__(self) -> None:
        self.rejected: list[EverliftError] = []

    def count_rejected(self, error: EverliftError) -> None:
        self.rejected.append(error)


async def test_attachment_of_a_client_is_refused() -> None:
    inference: Any = Inference()
    nothing: Any = None
    server = InferenceServer(inference, nothing)
    many = pb.GenerateManyRequest(requests=[pb.GenerateRequest(text="a"), ATTACHED])
    with pytest.raises(InvalidRequest, match="attachment must be empty"):
        await server.generate(ATTACHED.SerializeToString(), nothing)
    with pytest.raises(InvalidRequest, match="attachment must be empty"):
        server.generate_many(many.SerializeToString(), nothing)
    assert [error.field for error in inference.rejected] == ["attachment"] * 2
