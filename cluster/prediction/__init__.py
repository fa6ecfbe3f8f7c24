"""``everlift train-predictor``: how long outputs become, learnt from those that ended."""
