"""Plan a run on devices that need not be present: ``arclight plan``.

In: a recipe of a language model, or any model; out: tables of the fastest plans, JSON, and a recipe with the best one. Open `recipe_plan` first
(`recipe_tables` prints, `verification` compares with a real rank); `model` plans any other model as a pipeline.
"""
