"""The protocols: requests parsed into one neutral form, and replies rendered from one stream of
events.
"""
