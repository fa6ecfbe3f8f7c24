"""``everlift explain``: where the time of a request went."""
