"""Asynchronous and blocking clients, which retry calls and resume streams."""
