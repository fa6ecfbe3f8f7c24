"""Autoscaling by queued work, carried out by Ray Serve."""
