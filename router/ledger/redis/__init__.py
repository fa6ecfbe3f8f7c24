"""A ledger in Redis or Valkey."""
