"""A cluster under Ray Serve."""
