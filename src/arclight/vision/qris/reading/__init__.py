"""Find, rectify, decode and classify the codes in photos and videos.

A photo and a detector's boxes come in. `scanner` decides which reader is tried where; `decode` has the readers, from a plain one for whole
pictures to the module grids of `grid`, which `grid_search` finds from corners or a box and from what `finder_patterns` proposes, and
`refinement` fits; `error_correction` corrects codewords by the certainty of their modules, and by the data bits that `known_bits` guesses.
Out go the codes with their texts, corners and payloads: each reader of `decode` returns ``DecodedCode``s, with corners (4, 2) in pixels of
the whole photo, clockwise from the code's top left. `video` follows codes over frames and combines their readings by a vote; `evidence`
weighs and places a detector's boxes by what is seen of codes in them. Open `scanner` first.
"""
