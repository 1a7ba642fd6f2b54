"""The verbs of ``arclight``: one module for each, called with the arguments after its name.

`language` is what several verbs do with a language model's run, `corpora` the text half of ``arclight data``. What verbs share
lies one folder up: `arguments` reads arguments and recipes, `run_setup` builds tasks and trainers, `runs` finds checkpoints.
Open the module of your verb.
"""
