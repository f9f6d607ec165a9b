"""All observers of a server: the log of its events, and the endpoints, metrics, page and messages
that are made from it.

The core of the server records what happens through event_log, request_watch and explain, and
imports nothing else from here. Only the generator creates the observers that have state:
explanations, maps, snapshots and the last hour.
"""
