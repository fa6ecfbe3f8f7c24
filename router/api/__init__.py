"""Everything that clients can reach: the protocols, and the service behind them."""
