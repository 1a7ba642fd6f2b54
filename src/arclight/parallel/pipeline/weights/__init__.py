"""Weights of stages: out of files, begun, and into files, by the model's own names."""
