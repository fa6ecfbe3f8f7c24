"""Sizing of the KV cache by what memory is left."""
