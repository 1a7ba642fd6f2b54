"""What the parts of a model cost, where to cut it, and which schedule and micro-batches make its step shortest."""
