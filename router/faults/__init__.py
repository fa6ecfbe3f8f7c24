"""Fault injection: kills, pauses, partitions and slows parts of a cluster for tests."""
