"""A worker: a tensor-parallel group of ranks with one engine and one paged KV cache."""
