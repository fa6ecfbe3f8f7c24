"""Batching policies, one of which operators choose."""
