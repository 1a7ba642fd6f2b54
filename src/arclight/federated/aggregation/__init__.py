"""Aggregate client updates to means in fixed point, bit-identically for any arrival order.

In: contributions (tensors by key, weights, scales). Out: one mean a key, or the stepped weight, and statistics of the round. Open
`fold` first; `fixed_point` is its arithmetic, `chunks` its threads and buffers, `strategy_step` applies the server's optimizer to
each mean, `statistics` measures norms, drift and noise.
"""
