"""Cost the parts of a model, and choose the cut, schedule and micro-batches of the shortest step.

In comes a call graph; ``measure`` times its calls (by a ``timed_pass``) or computes their times from operations; ``partition`` cuts a chain of costs;
``candidates`` evaluates one way to run a pipeline, and ``pipeline_search`` searches all of them. Nothing here knows about stages. Open ``measure.py`` first.
"""
