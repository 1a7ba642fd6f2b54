"""Cost the parts of a model, and choose the cut, schedule and micro-batches of the shortest step."""
