"""The engine: prefill and decode of many sequences over one pool.

Knows token ids and caches; no text and no HTTP.
"""
