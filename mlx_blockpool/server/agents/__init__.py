"""Agents over HTTP: names for paths, what is done with them, and prompts that are computed at start."""
