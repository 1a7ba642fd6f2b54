"""Programs: exported models, run and timed without the model.

A file comes in; `metadata` checks its seal and reads its description, `program` runs it in ONNX Runtime, `processing` turns a
user's inputs into tensors and tensors into results, and `benchmark` times programs beside each other. Open `program` first.
"""
