"""Callbacks of language runs that recipes switch on: evaluation of a suite while training, measures of experts."""
