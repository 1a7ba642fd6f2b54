"""Run and time programs: exported models, without the model's code.

A file comes in; `metadata` checks its checksum and reads its description, `program` runs it in ONNX Runtime, `processing` turns a
user's inputs into tensors and tensors into results, and `benchmark` times programs beside each other. Open `program` first.
"""
