"""Draw recorded and predicted pipeline steps.

A step trace comes in; a page or figure (``timeline``) or a file for Perfetto (``chrome``) goes out.
"""
