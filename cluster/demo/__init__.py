"""`everlift demo`: a cluster on this machine that loses a worker and no token."""
