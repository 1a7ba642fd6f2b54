"""Faults of a data set, found before a run pays for them.

A data.yaml comes in; `checks` finds what is wrong, by file and line, with the help of `fingerprints`, which finds images that
look the same. `sheet` draws the worst findings on a page, `mend` writes a copy without those that have one answer. Open
`checks` first.
"""
