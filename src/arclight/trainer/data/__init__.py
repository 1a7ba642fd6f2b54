"""Load and validate a stage's data and move its batches to the device.

In: the user's dataloaders and limits; out: batches on the device.

Open ``connector`` first: it fills a ``stage_data`` per stage and moves batches to the device. ``checks`` validates loaders, ``limits``
counts batches and validations.
"""
