"""Attention over the paged KV cache: the interface, and its implementations."""
