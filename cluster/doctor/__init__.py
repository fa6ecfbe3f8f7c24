"""``everlift doctor``: checks of a machine or a cluster, with advice on how to fix problems."""
