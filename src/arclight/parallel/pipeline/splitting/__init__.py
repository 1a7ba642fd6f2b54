"""Cut a model into stages.

``capture`` runs one forward on tensors without data (``placeholder_tensor``, ``output_specs``, ``proxy_modules``) and gives the call
graph; ``stage_assignment`` says what each stage computes, receives and holds; ``sliced_module`` (by a ``stage_interpreter``) runs the
model's own code with the stage's parts only, described by ``stage_info``; ``stage_tensors`` lists its tensors with their ties, and
``global_rng`` refuses forwards that draw from Python's or NumPy's generators. ``layer_pruning`` is the shortcut for models that keep
blocks in ``layers``; ``traced`` cuts a graph of operations where modules cannot be cut. Open ``capture.py`` first.
"""
