"""Drafts: tokens that are guessed to come next, from what is known already; where guesses come
from and how many are worth it.
"""
