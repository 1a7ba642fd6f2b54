"""Define vision tasks as ordinary modules and data modules, as a user would write them.

A recipe's `settings` come in, and ``kind`` chooses the task: they build its module and its data. `module` is the base class
of all tasks, with the methods that a task overrides: head, loss, metrics, processing. `processing` is pre- and postprocessing, the same in
prediction and in deployed programs: photos to input, output to results. `distillation` trains with a teacher, `measuring` chooses settings
that are left to the machine. `deployment` writes a trained model as a program and measures it. Open `detection` first; `classification`
differs from it most.
"""
