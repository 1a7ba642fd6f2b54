"""Read data sets of other formats into YOLO's, and write COCO's from it.

Annotations come in through `coco` (json with boxes, polygons and masks, whose text is that of `run_lengths`) or `voc` (xml); what they have in common is
`annotations`, which also writes a YOLO data set and reads one back for export. ``arclight data import`` and ``export`` call these. Open
`annotations` first.
"""
