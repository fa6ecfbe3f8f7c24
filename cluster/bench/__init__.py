"""``everlift bench``: a load on any endpoint, what came of it, and how two of them compare."""
