"""``everlift doctor``: what is missing on a machine or in a cluster, and how to fix it."""
