"""Results of a vision model: what was found, how good that is, and pictures of both.

`detections` are the boxes of one photo, whatever produced them; `metrics` scores many of them against true boxes, and `records`
keeps them for `analysis`, which breaks scores down. `draw` puts boxes on photos, `writers` writes the results of many images and
videos as they come, `plots` a run's charts, and `validation_page` the page of an evaluation; `comparison` sets two detectors side
by side. Open `detections` first.
"""
