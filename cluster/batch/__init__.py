"""``everlift batch``: turns a file of prompts into a file of results, with or without a cluster.

Prompts that have a result are done. If an interrupted batch is run again, it continues with the
other prompts.
"""
