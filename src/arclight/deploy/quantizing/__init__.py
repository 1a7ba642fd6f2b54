"""Quantization of captured graphs: which tensors become integers, in which ranges, with or without training.

A model comes in with calibration batches (`ptq`) or to be trained (`qat`, and `callback` for a whole run); a `QuantizedModel`
goes out. `placement` decides where integers begin and end, `observers` find the ranges, `batch_norm` fuses and folds batch
norms, `graphs` gives tensors their names, and `pt2e` alone imports torchao. Open `ptq` first.
"""
