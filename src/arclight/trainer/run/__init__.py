"""Write the files of a run.

In: settings and metrics; out: a run folder with logs and ``report.html``.

Open ``folder`` first. ``paths`` decides where loggers and checkpoints write, ``durations`` parses lengths of runs, ``report`` writes the
page, from ``curves`` drawn by ``svg``.
"""
