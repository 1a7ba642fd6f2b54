"""Networks of the vision tasks: images (N, 3, H, W) in, raw levels or decoded boxes out.

`yolov5` is the network, `heads` what its last maps become and how that is decoded; `architectures` are the tables that it runs, of
`blocks`; `anchors` the box shapes that its head starts from; `loss` what its raw levels are trained on. `one_to_one` is the head, the
assignment and the loss of detectors without anchors and suppression. Open `yolov5` first.
"""
