"""A rank as a server: sessions with routers, the engine's loop, start and end."""
