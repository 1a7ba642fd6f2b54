"""Track objects through a video: detections in, those of tracks out, with their ids.

`tracks` makes the trackers by name and keeps one for each video; `byte_track` and `oc_sort` are the trackers, of a `kalman` filter
and the `assignment` of boxes to tracks. `counting` counts objects at lines and in zones, `mot_metrics` scores a tracker.
``arclight predict --track`` and `Detector.track` call these. Open `tracks` first.
"""
