"""Networks of the vision tasks: images (N, 3, H, W) in, raw levels or decoded boxes out.

`yolov5` holds the blocks, the network and the table of its published sizes; `anchors` the box shapes that its head starts
from; `loss` what its raw levels are trained on. Open `yolov5` first.
"""
