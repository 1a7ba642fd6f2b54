"""Store, list, edit and prune the checkpoints of rounds, and keep a run's history.

In: tensors of a server step, and journal records. Out: ``rounds/<number>/`` checkpoints, history in ``run.db``, ``metrics.csv``. Open
`store` first (`Rounds`: what is there); `writer` writes a round tensor by tensor, `initial_weights` reads what a run starts from,
`history` says what became of each round, `tools` are the functions behind ``arclight checkpoint``.
"""
