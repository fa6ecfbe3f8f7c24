"""Requests that were recorded, from files as their authors publish them."""
