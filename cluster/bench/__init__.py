"""Load generator (``everlift bench``): load an endpoint, report figures, compare reports."""
