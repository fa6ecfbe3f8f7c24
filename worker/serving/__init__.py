"""Serving of a rank: sessions with routers, the engine's loop, start and stop."""
