"""Data sets of other formats, read into ours and written from it.

Annotations come in through `coco` (json with boxes, polygons and run-length masks) or `voc` (xml); what they have in common is
`annotations`, which also writes a YOLO data set and reads one back for export. Open `annotations` first.
"""
