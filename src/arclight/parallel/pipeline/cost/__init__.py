"""Estimate costs of a model's parts; choose cut, schedule and micro-batches by them.

In comes a call graph; ``measure`` times its calls (by a ``timed_pass``) or predicts their times from operations; ``partition`` cuts a chain of
costs; ``candidates`` evaluates one way to run a pipeline, and ``pipeline_search`` searches all of them. Open ``measure.py`` first.
"""
