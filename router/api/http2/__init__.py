"""gRPC server on asyncio and h2; README.md explains why it replaces grpc.aio."""

from router.api.http2.call import Call, behaviour
from router.api.http2.limits import Limits
from router.api.http2.server import Server

__all__ = ["Call", "Limits", "Server", "behaviour"]
