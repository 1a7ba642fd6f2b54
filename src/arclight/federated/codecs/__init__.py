"""Encode tensors for the wire and decode them.

The codec is a property of each manifest entry.

`encoding` is the door: `encode`, `decode`. `blockwise` has 8 and 4 bits, `sparse` the largest values; both read their input from an
`error_feedback.ErrorFeedback`, which keeps the residual. `delta_chain` encodes the way down, `settings` is what a recipe may set.
"""
