"""Initialise, load and save the weights of stages under the model's own names.

Whatever the number of stages, the same files and the same first values: ``initialize`` draws by (seed, name), ``load`` reads
safetensors, ``save`` writes one folder together. Open ``load.py`` first.
"""
