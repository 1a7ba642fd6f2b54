"""Mask tensors by name: exchanged or personal ones, and the experts of each client.

`settings` is what a recipe may set; `transfer_mask.TransferMask` decides for one client and round, `ServerMasks` for all; `experts`
splits stacks of experts.
"""
