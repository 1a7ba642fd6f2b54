"""Encode tensors for the wire and decode them, by the codec of each manifest entry.

Open `encoding` first: `encode`, `decode`. `blockwise` has 8 and 4 bits, `sparse` the largest values; both read their input from an
`error_feedback.ErrorFeedback`, which keeps the residual. `delta_chain` encodes weights for download, `settings` is what a recipe may set.
Clients encode uploads and servers decode them: parts and thresholds (`layout`) are wire format, and `simulation.sizes` counts by them.
"""
