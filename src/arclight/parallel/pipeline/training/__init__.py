"""A user's own steps in a pipeline, without code of the user's for it."""
