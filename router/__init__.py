"""The front of a cluster: takes requests, queues them, dispatches them, streams tokens back."""
