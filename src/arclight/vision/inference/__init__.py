"""Improve predictions by several passes: slices, test-time augmentation, ensembles.

Each function takes a detector and returns one that finds more and costs more. `slicing` predicts on tiles of large
images, `test_time` on augmented copies of each, `fusion` combines several detectors; they can be nested. A detector
here is any function from RGB images to a ``Detections`` for each. Open `fusion` first. `heat_map` shows which parts of
an image a network's output depends on.
"""
