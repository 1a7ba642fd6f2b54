"""Run stages by a schedule over processes.

``runner`` (modules written for runners) and ``pipe_runner`` (split models) cut a batch and hand micro-batches to the ``engine``, which
finds what crosses each cut (``boundary``) and drives torch's schedules (``torch_pipelining``) over ``stage`` objects. Around them:
``split_backward``, ``tied_parameters``, ``consistency_check`` before the first step, ``failure_store`` when one fails, ``recording``.
Open ``engine.py`` first.
"""
