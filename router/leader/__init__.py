"""Leader of the routers: its queue loop, its lease, and its message streams with all routers."""
