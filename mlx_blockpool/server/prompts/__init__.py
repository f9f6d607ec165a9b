"""Prompts: rendered and tokenized in processes of their own, so that no request can hold the server's."""
