"""Whom a step is for: policies that the scheduler asks, one of which operators choose."""
