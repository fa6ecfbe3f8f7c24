"""``everlift key`` and ``everlift tenant``: API keys and the limits of tenants."""
