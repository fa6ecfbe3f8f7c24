"""Ranks of a tensor-parallel worker: process group, collectives, rendezvous, liveness."""
