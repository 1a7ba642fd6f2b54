"""What each process of a pipeline does in a step, in which order, and when, as it would be."""
