"""Execution of a step: torch, CUDA graphs, sampling, swapping, and the fake runner."""
