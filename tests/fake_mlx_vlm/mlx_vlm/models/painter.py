"""A pipeline without a model class."""
