"""The forms of replies, as masks over tokens: JSON schemas, grammars, tool calls. Knows token
ids and text; no arrays of mlx.
"""
