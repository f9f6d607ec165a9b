"""How models generate."""
