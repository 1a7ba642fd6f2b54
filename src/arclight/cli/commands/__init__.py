"""Implement the verbs of ``arclight``: a module each, called with the arguments after it.

`language` is what `predict` and `evaluate` do with a language model's run or program, `corpora` the text half of ``arclight data``; `export`
also has ``quantize``, `evaluate` both ``validate`` and ``test``; `comparing`, `tune`, `federate` and `plan` are folders beside this one. What
verbs share lies one folder up: `arguments` reads arguments and recipes, `run_setup` builds tasks and trainers, `runs` finds checkpoints.
Open the module of your verb.
"""
