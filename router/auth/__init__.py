"""Authentication: API keys, their tenants, and the limits of tenants."""
