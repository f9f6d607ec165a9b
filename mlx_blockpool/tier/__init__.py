"""Cached prefixes on disk: written in the background, and restored where that is faster than
computing.
"""
