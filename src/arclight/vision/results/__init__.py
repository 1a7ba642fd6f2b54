"""Results of a vision model: what was found, how good that is, and pictures of both.

`detections` are the boxes of one photo, whatever produced them; `metrics` scores many of them against true boxes; `draw`
puts boxes on photos, `writers` writes the results of many images and videos as they come, and `plots` a run's charts.
Open `detections` first.
"""
