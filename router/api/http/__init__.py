"""HTTP server, and what all APIs over HTTP share."""
