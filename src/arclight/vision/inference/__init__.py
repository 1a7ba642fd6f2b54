"""Improve predictions by several passes: slices, test-time augmentation, ensembles.

Each function takes a detector, or several, and returns one that finds more and costs more. `slicing` predicts on tiles of large
images, `test_time` on changed copies of each, `fusion` combines several detectors; they can be nested. A detector
here is a `fusion.Detect`: any function from RGB images to a ``Detections`` for each (``test_time.multi_scale`` needs a `Detector`).
`heat_map` shows which parts of an image a network's output depends on. ``arclight predict`` calls them. Open `fusion` first.
"""
