"""Search for the best settings of a recipe or a user's module: ``arclight tune``.

The ranges come from ``--search.FIELD`` or the recipe's table ``[search]`` (`space`). `search` runs trials, each as `trial` has it: an
ordinary run with one set of values. `study` keeps them in Optuna's database; `search_report` shows them. Open `search` first.
"""
