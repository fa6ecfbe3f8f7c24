"""``everlift train-predictor``: training of a predictor of output lengths."""
