"""Quantize captured graphs, with or without training.

A model comes in with calibration batches (`ptq`) or to be trained (`qat`, and `callback` for a whole run); a `QuantizedModel` goes out, which keeps
the float model's state-dict names. `placement` decides where integers begin and end, `observers` find the ranges, `batch_norm` fuses and folds batch
norms, `graphs` gives tensors their names, and `pt2e` alone imports torchao. `ptq` calls `linear` for recipes of linear layers alone, without
calibration (`formats.onnx_graph` writes its two operators as ONNX Runtime's), which `rounded_linear` trains, `bfloat16` for that type, and
`sensitivity` if a metric drops too far, to keep layers in float. `training_settings` is the table ``[qat]`` of a recipe, `trained` tells what a
checkpoint was trained for. Open `ptq` first.
"""
