"""The part of a router replica that speaks with clients."""
