"""Parsers of outputs: one file for each format, behind the interface of base.py. Pure."""
