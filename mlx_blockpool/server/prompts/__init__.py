"""Prompts: rendered and tokenized in worker processes, so that no request can block the
server's.
"""
