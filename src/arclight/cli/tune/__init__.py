"""``arclight tune``: search the settings of a recipe, or of a user's own module, for the best ones.

The ranges come from ``--search.FIELD`` or the recipe's table ``[search]`` (`space`). `search` runs trials, each as `trial` has it: an
ordinary run with one set of values. `study` keeps them in Optuna's database; `search_report` shows them. Open `search` first.
"""
