"""Generation without a cluster: a model in this process."""
