"""``arclight compare``: compare two programs, checkpoints or runs of one task.

The exit status is for CI.

`compare` reads the options; `candidates` opens both and finds the data and scores to compare them by; `detectors` adds intervals, images
and a page for detectors. Open `compare` first.
"""
