"""Metrics and traces of a router."""
