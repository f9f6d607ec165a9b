"""The models of one server: which are loaded, the requests that wait for them, and swaps of
models.
"""
