"""Networks of the vision tasks: images (N, 3, H, W) in, raw levels or decoded boxes out.

`yolov5` is the network, `heads` are its output layers and their decoding; `architectures` are the tables that it is built from, of
`blocks`; `anchors` are the box shapes that its head starts from; `loss` is computed on its raw levels. `one_to_one` is the head, the
assignment and the loss of detectors without anchors and suppression. Open `yolov5` first.
"""
