"""Bring a stage's data to its loop. In: the user's dataloaders and limits; out: batches on the device.

Open ``stage_data`` first. ``checks`` validates loaders, ``limits`` counts batches and validations, ``batches`` moves them to the device.
"""
