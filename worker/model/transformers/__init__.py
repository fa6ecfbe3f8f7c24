"""Decoders of transformers over the paged KV cache, for architectures that have no ModelSpec."""
