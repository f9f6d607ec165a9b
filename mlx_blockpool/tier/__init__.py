"""Cached prefixes on disk: written behind, found again by a restart, and brought back when that is faster than computing."""
