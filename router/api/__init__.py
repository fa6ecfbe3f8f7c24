"""Client-facing protocols, and the service that they share."""
