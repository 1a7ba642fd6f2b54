"""Compare two programs, checkpoints or runs of one task: ``arclight compare``.

`compare` reads the options and returns the exit status, by which CI decides; `candidates` opens both and finds the data and scores to compare
them by; `detectors` adds intervals, images and a page for detectors. Open `compare` first.
"""
