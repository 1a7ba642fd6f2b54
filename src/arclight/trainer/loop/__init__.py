"""Run the training, evaluation and prediction loops of a Trainer.

In: settings, module and data; out: weights, progress and hook calls.

Open ``fit`` first. ``session`` runs an entry point from launch to teardown, or within a hook of a run (``verification`` checks the module,
``signals`` handles SIGTERM); ``fit`` and ``evaluation`` are the loops, ``step`` composes a training step of ``gradients``, ``accumulation``,
``optimizers`` and ``schedulers``. ``hooks`` resolves hooks, ``run_state`` and ``progress`` are the state, ``predictions`` what predict
returns.
"""
