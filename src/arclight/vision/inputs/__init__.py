"""Images for prediction: from files, memory, cameras and network streams to frames, one at a time or in batches.

`image_source` takes whatever a user names; `memory_images` are arrays, tensors, PIL images and bytes, `video` are video files,
`live` are cameras, streams and the screen, which end when somebody ends them. `prefetch` reads ahead of the model.
Open `image_source` first.
"""
