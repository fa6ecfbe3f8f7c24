"""The console: a page that shows a cluster as it serves, and what feeds it."""
