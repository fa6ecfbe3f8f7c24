"""A gRPC server on asyncio and h2."""
