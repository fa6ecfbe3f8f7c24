"""Files API of OpenAI: files of requests, and results of batches, in the ledger."""
