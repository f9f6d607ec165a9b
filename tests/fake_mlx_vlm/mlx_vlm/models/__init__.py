"""One module for each model type."""
