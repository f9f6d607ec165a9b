"""Known prefixes: block hashes, trie, checkpoints of window layers, and the cache that hands them out."""
