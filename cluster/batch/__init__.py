"""``everlift batch``: a file of prompts to a file of results, with a cluster or without one.

What is in the results is done: run again, a batch that was cut off goes on with the rest.
"""
