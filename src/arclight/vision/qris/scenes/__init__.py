"""Draw synthetic photos of payment codes, for training and for measuring readers.

`generate` writes a data set, each scene of it drawn by `scene` from seed, number, size and merchant alone: `contents` says what a code holds,
`symbols` prints it, `posters` and `prints` are the things that carry it (with the tools of `drawing`), `backgrounds` and `distractors` what
is around and in front of it, `camera` the view of it, and `merchants` what the codes of one place have in common. `fraud` draws pairs with a
sticker over a code, `motion` clips of a moving camera. Another order of random draws changes every data set of the same seed. Open `scene`
first.
"""
