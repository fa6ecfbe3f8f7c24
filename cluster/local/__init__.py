"""A cluster of processes on one machine, without Ray."""
