"""Find faults of a data set before training.

A data.yaml comes in; `checks` finds errors by file and line, with the help of `fingerprints`, which finds near-duplicate images.
`sheet` draws the worst findings on a page, `mend` writes a copy in which unambiguous faults are corrected. ``arclight data lint`` calls
all of them, a fit of a detector `checks` alone. Open `checks` first.
"""
