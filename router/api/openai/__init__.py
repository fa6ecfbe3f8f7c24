"""OpenAI's HTTP API of the gateway, with server-sent events."""
