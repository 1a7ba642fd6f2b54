"""Verification of quantizers: what one does to a model, measured and compared with what is expected of it.

A model, batches and a quantizer come in; `conversion` makes the quantized graph as training or calibration would, `expectations`
counts its operators and reads its scales, `float64_reference` computes it again in float64, and `verify` puts all of it, and runtimes, into
one report. Open `verify` first.
"""
