"""Quantization of captured graphs: which tensors become integers, and in which ranges.

A model and calibration batches come in; `ptq` captures, calibrates, converts and judges. `placement` decides where integers
begin and end, `observers` find the ranges of activations, and `pt2e` alone imports torchao. Open `ptq` first.
"""
