"""Faults on purpose, and the search for what they may have broken."""
