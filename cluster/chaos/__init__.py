"""Fault injection in a running cluster, and a check of the ledger for broken requests."""
