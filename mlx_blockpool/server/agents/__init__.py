"""Agents over HTTP: names for paths, changes to them, and prompts that are computed at start."""
