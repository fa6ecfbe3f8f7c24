"""Synthetic workloads with the statistics of published traces, and recorded workloads."""
