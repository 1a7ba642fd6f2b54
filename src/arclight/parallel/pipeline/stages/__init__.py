"""A model cut into stages: what of it is called in which order, where it can be cut, and stages that run their share of it."""
