"""Cut a traced graph of operations into stages, where modules cannot be cut.

``export_graph`` exports the model, ``graph_calls`` groups operations into calls, ``traced_stage`` makes stages of them for `split`. Open
``traced_stage.py`` first.
"""
