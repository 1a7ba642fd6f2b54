"""Answer requests by task: `detection` takes photos, `tensors` plain tensors of any program (Open Inference Protocol)."""
