"""Callbacks that observe a run and change nothing: devices, learning rates, throughput, timelines, the model's summary, the run's report."""
