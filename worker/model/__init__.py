"""The model that a worker runs: its spec, the decoder and its layers, and how it is loaded."""
