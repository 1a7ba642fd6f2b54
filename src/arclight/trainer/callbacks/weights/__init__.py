"""Change weights during a fit: average, finetune, prune or synchronise them.

In: the weights after a step; out: their average, or weights that replace them.

Open ``weight_averaging`` first: averages (EMA), which ``stochastic_weight_averaging`` specialises. ``diloco`` synchronises replicas,
``finetuning`` unfreezes layers, ``pruning`` sets weights to zero.
"""
