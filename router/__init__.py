"""Router of a cluster: accepts requests, queues and dispatches them, and streams tokens back."""
