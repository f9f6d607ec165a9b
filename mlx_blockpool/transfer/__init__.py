"""Prefixes as prompt-cache files of mlx-lm: written, read, proven and imported, for the command line and the server."""
