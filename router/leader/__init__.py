"""The leader of the routers: its loop, lease and streams."""
