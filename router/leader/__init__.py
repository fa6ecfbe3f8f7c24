"""Leader of the routers: its loop, its lease, and its streams with the gateways."""
