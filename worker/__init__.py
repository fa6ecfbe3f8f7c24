"""One tensor-parallel group of ranks: one engine, one paged KV cache."""
