"""vLLM as the engine of a worker."""
