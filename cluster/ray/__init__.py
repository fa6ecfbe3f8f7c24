"""Cluster under Ray Serve."""
