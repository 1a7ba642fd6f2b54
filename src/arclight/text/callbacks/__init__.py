"""Callbacks of language runs that recipes switch on: ``suite_evaluation`` while training, ``expert_monitor`` for choices of experts."""
