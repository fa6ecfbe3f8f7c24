"""Batching policies; operators choose one of them."""
