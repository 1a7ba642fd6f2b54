"""Images for prediction: from files, memory, cameras and network streams to frames, one at a time or in batches.

`image_source` takes any source that a user names, reads images and video files, and reads ahead of the model; `memory_images` are arrays,
tensors, PIL images and bytes; `live` are cameras, streams and the screen, which end when they are closed, read in `reader_thread`s.
Open `image_source` first.
"""
