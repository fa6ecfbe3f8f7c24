"""``everlift explain``: shows where the time of a request went."""
