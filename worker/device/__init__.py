"""The device that a rank computes on: its kind, memory and streams."""
