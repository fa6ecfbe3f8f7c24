"""Decoders of transformers, run over the paged KV cache, for families without a spec of our own."""
