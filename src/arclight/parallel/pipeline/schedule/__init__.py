"""Order the actions of a pipeline step; check and simulate orders, explain idle time.

No model and no device is needed. ``actions`` are written and read; ``order_generators`` make orders of them, ``orders``
checks any order, ``table`` knows schedules by name. ``simulation`` gives a ``step_trace``: when each action runs, which process
waits, and why. Open ``table.py`` first.
"""
