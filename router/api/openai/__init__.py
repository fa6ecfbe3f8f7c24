"""OpenAI's HTTP API of the router, with server-sent events."""
