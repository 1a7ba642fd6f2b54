"""Callbacks that change weights between steps: averages, DiLoCo, gradual unfreezing, pruning."""
