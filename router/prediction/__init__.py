"""Prediction of output lengths from requests and from ended outputs."""
