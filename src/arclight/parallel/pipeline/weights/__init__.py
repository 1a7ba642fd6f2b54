"""Initialise, load and save the weights of stages under the model's own names.

Names of tensors and initial values do not depend on the number of stages: ``initialize`` draws by (seed, name), ``load`` reads
safetensors, ``save`` writes one folder together. `Pipe` calls all three. Open ``load.py`` first.
"""
