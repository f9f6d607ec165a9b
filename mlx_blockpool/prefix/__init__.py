"""Cached prefixes: block hashes, trie, checkpoints of window layers, and the cache that shares
them.
"""
