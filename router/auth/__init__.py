"""Who may come in: keys, the tenants that they are of, and what these may ask for."""
