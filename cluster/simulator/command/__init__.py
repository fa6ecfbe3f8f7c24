"""What people type to ask for a forecast."""
