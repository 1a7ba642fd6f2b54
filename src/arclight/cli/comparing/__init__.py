"""``arclight compare``: two programs, checkpoints or runs of one task side by side, and the exit status for who builds on it.

`compare` reads the options; `candidates` opens what is named and finds what both are judged by; `detectors` adds intervals, images
and a page for detectors. Open `compare` first.
"""
