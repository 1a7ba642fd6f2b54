"""Show progress bars. In: the trainer's counters; out: lines in a terminal.

Open ``progress_bar`` first, their base: totals and metrics. ``rich_progress`` is the default, ``tqdm_progress`` the other; ``timing``
estimates speed and time left.
"""
