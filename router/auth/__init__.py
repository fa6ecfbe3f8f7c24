"""Authentication: keys, their tenants, and the limits of tenants."""
