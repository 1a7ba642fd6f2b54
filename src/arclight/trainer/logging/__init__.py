"""Collect, reduce and publish logged values. In: ``self.log`` calls; out: rows and metrics.

Open ``results`` first: values on their device. ``rules`` checks calls, ``sync`` reduces over ranks, ``metrics`` holds the newest values,
``reporting`` publishes them as rows and metrics.
"""
