"""The continuous-batching engine: scheduler, KV blocks, sequences and plans. Pure."""
