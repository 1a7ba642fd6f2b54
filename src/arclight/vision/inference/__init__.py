"""Inference beyond one pass: each function takes anything that detects, and returns what detects better and costs more.

`slicing` looks at parts of large images, `test_time` at changed copies of each, `fusion` asks several detectors; they can be
nested. What detects is a function from RGB images to a ``Detections`` for each. Open `fusion` first. `heat_map` shows where in an
image a network's answers come from.
"""
