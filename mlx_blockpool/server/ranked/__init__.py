"""One server of several ranks: rank 0 leads the turns, and the others follow."""
