"""Draw recorded and predicted pipeline steps.

A `Trace` or `Recording` comes in; a page or figure (``timeline``) or a file for Perfetto (``chrome``) goes out. Open ``timeline.py`` first.
"""
