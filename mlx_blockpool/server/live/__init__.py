"""What happens in a server, as it happens: the log of its events, and the endpoints that read it."""
