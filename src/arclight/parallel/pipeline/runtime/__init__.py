"""Run stages by a schedule over processes.

Used by the strategies (``install``, and ``steps`` through ``runner``) and by ``Pipe.on`` (``pipe_runner``). ``runner`` (modules written for
runners) and ``pipe_runner`` (split models) cut a batch and hand micro-batches to the ``engine``, which finds the values that cross each cut
(``boundary``) and drives torch's schedules (``torch_pipelining``) over ``stage`` objects. ``install`` cuts a module's model down to this
rank's stages, ``stage_program`` is what a stage runs (its part of the model, the loss) and the topology, ``batch_splitting`` and
``loss_reduction`` go from a batch to micro-batches and back. Around them: ``split_backward``, ``tied_parameters``, ``consistency_check``
before the first step, ``failure_store`` when one fails, ``recording``. Open ``engine.py`` first.
"""
