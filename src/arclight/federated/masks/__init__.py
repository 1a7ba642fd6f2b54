"""Mask tensors by name: which are exchanged in a round, which stay personal, which experts a client has.

`settings` is what a recipe may set; `transfer_mask.TransferMask` decides for one client and round, `ServerMasks` for all; `experts`
splits stacks of experts.
"""
