"""Many sites, one model: each trains on its own data, and only changes of weights travel.

A server samples clients, sends weights, folds what comes back in fixed point and steps (`Server`); a client trains with
its own `Trainer` and keeps its data (`Client`). One protocol runs inside one process, over HTTPS, and under Flower.
"""
