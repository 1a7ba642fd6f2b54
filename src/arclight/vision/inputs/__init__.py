"""Read images for prediction, one at a time or in batches: files, memory, cameras, streams.

`image_source` takes any source that a user names, reads images and video files, and reads ahead of the model; `memory_images` are arrays,
tensors, PIL images and bytes; `live` are cameras, streams and the screen, which are read until they are closed or lost. Both read ahead
in `reader_thread`s. Out come `Frame` objects. Open `image_source` first.
"""
