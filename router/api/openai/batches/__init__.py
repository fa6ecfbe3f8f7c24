"""Batches API of OpenAI: files of requests that run when nothing else is queued."""
