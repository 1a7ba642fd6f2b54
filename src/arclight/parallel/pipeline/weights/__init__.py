"""Initialise, load and save the weights of stages under the model's own names."""
