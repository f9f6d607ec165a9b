"""Several processes that run one model together: what they exchange, and what they decide
together.
"""
