"""What a router says of itself and of its cluster to Prometheus."""
