"""Formats that a captured model is written in, each proven to compute what the model computes."""
