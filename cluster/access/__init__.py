"""``everlift key`` and ``everlift tenant``: who may come in, and what they may ask for."""
