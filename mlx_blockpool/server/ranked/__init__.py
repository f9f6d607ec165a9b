"""A server of several ranks: its leader with the clients, the replicas that follow it, and the
end of a rank.
"""
