"""Cluster in virtual time: simulated processes over a simulated network, with injected faults.

Routers, workers and clients are the product's.
"""
