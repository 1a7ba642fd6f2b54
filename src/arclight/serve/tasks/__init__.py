"""What models do for a request: `detection` answers photos, `tensors` any program's plain tensors (Open Inference Protocol)."""
