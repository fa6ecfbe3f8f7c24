"""Autoscaling by queued work: policies that Ray Serve calls and whose decisions it carries out."""
