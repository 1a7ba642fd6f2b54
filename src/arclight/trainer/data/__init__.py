"""Load and validate a stage's data and move its batches to the device.

In: the user's dataloaders and limits; out: batches on the device.

Open ``stage_data`` first. ``checks`` validates loaders, ``limits`` counts batches and validations, ``batches`` moves them to the device.
"""
