"""Prometheus metrics of a router and its cluster."""
