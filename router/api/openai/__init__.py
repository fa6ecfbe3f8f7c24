"""The gateway as OpenAI's clients know it: over HTTP, with server-sent events."""
