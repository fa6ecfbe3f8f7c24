"""The model that a worker runs: its spec, the decoder, its layers, and the loading of weights."""
