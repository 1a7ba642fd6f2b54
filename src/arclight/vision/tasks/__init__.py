"""Vision tasks as ordinary modules and data modules, as a user would write them.

A recipe's `settings` come in, and ``kind`` chooses the task: they build its module and its data. `module` holds what all tasks share, and
the seam that one is written at: head, loss, metrics, processing. `detection` is the task to read first, `classification` the one furthest
from it. `processing` is what lies around the network, in training and in deployed programs alike: photos to input, output to results.
`distillation` is a teacher, `measuring` what settings leave to the machine. `deployment` writes a trained model as a program and measures
one.
"""
