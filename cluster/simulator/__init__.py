"""Simulator of a cluster, in which the product's own classes decide in virtual time."""
