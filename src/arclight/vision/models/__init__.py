"""Define the networks of the vision tasks: images in, logits or decoded predictions out.

`yolov5` is the network, `heads` are its output layers and their decoding; `architectures` are the tables that it is built from, of
`blocks`; `anchors` are the box shapes that its head starts from; `loss` is computed on its raw output. `one_to_one` is the head, the
assignment and the loss of detectors without anchors and suppression. ``vision.tasks`` builds and trains these. Open `yolov5` first.
"""
