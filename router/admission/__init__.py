"""Admission queue: decides, without I/O, when which request is dispatched to which worker."""
