"""Requests that are made up, with the statistics of published traces."""
