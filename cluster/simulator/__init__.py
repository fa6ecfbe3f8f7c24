"""What a cluster would do with a workload: decisions of the product in virtual time."""
