"""Known prefixes on disk as well: what is written behind, what a restart finds, what is brought back."""
