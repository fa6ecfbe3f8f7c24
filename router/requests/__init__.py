"""A request's life in the router that owns it."""
