"""How many workers a cluster has: decided by what waits, carried out by Ray Serve."""
