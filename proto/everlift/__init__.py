"""Everlift's client library and wire contract: all that a customer imports."""
