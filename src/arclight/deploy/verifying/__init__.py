"""Verify quantizers: measure their effect on a model, and compare it with expectations.

A model, batches and a quantizer come in; `conversion` makes the quantized graph by calibration or training, `expectations` counts its operators and
reads its scales, `float64_reference` computes it again in float64, and `verify` collects all of it, with runs in runtimes, in one report. Open
`verify` first.
"""
