"""Bring a stage's data to its loop: in come the user's loaders and limits, out go batches; open ``stage_data`` first."""
