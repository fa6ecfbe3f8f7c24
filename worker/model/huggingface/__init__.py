"""Model configurations in the form of Hugging Face, read into the spec of a model."""
