"""Results of a vision model: what was found, how good that is, and pictures of both.

`detections` are the boxes of one photo, whatever produced them; `metrics` scores many of them against true boxes; `draw`
puts boxes on photos, and `plots` writes a run's charts. Open `detections` first.
"""
