"""Observe language runs: evaluation suites, and monitors of experts.

In recipes they are ``[task.evaluation]`` (``suite_evaluation``) and a monitor of kind experts (``expert_monitor``).
"""
