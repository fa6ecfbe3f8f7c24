"""The clients: asynchronous, blocking, and what retries and resumes for them."""
