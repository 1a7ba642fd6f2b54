"""Apply a plan to a model in place."""
