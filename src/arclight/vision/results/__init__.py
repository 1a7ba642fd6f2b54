"""Hold the predictions of vision models; score, draw, write and compare them.

`detections` are the boxes of one photo, whatever produced them, with their `masks` if they have any; `image_class` is the prediction of
a classifier. `metrics` scores many of them against the truth (`pose_metrics` keypoints, `obb_metrics` rotated boxes), and `records` keeps
them for `analysis`, which breaks scores down. `draw` puts them on photos, `writers` writes those of many images and videos as they come,
`plots` a run's charts, and `validation_page` the page of an evaluation; `comparison` compares two detectors, and `labelling`
selects images to label next. Open `detections` first.
"""
