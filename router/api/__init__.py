"""Protocols that clients can reach, and the service behind them."""
