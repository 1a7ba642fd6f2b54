"""Steps of a pipeline recorded and shown: on a page, as a figure, in Chrome's format, in numbers."""
