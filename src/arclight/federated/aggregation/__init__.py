"""Average the updates of many clients in fixed point, with the same bits for any order of arrival.

In: contributions (tensors by key, weights, scales). Out: one mean a key, or the stepped weight, and statistics of the round. Open
`fold` first; `fixed_point` is its arithmetic, `chunks` its threads and buffers, `strategy_step` applies the server's optimizer to
each mean, `statistics` measures norms, drift and noise.
"""
