"""A ledger in memory, for tests and a single process."""
