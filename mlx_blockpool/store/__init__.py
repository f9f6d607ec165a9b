"""What outlives the process: whole-or-absent files and records that prove what they hold.

Knows no pool and no engine.
"""
