"""Simulator of a cluster: the product's decisions in virtual time."""
