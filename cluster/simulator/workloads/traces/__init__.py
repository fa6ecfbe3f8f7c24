"""Recorded workloads, from trace files in the formats of their authors."""
