"""Anthropic's Messages API on the server's one neutral chat request."""
