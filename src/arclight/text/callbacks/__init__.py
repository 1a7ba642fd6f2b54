"""Callbacks of language runs in recipes: evaluation suites, and monitors of experts.

They are ``suite_evaluation`` and ``expert_monitor``.
"""
