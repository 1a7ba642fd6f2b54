"""Images and boxes on their way to a model: bytes to pixels, labels, data sets, augmentation, inputs of prediction."""
