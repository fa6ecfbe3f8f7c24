"""A ledger server that a cluster runs itself."""
