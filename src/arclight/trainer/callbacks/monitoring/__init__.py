"""Observe a run without changing it: log values, print a summary, write a report.

``device_stats_monitor``, ``lr_monitor`` and ``throughput_monitor`` log, and so do ``activation_monitor`` and ``curvature_monitor``, each
n-th step on the base in ``step_monitor``; ``model_summary`` prints; ``pipeline_timeline`` and ``run_report`` write files into the run
folder. ``metric_report`` reports a value to ``arclight tune``, and ends the run if told to.
"""
