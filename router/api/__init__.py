"""What clients can reach: the protocols and what may be asked."""
