"""The durable record of every request."""
