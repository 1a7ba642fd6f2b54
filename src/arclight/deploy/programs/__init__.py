"""Run and time programs: exported models, without the model's code.

A folder or an .onnx file comes in; `folder` and `metadata` check digests and signature and read the description, `program` opens it in its runtime
(`onnx_runtime`, `openvino`, `torch_runtime`, `executorch_runtime`, which implement the protocol of `session`), `other_runtime` compares and times it
in another one, `fresh` opens it in a new process, `processor` names the instruction sets that it needs, `processing` turns a user's inputs into
tensors and tensors into results, and `benchmark` times programs and models beside each other. Open `program` first.
"""
