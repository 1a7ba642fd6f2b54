"""Load images with boxes or classes, from files to batches for a model.

Files of a YOLO-format data set come in: `data_yaml` says where they are, `labels` checks them, `site_split` picks those of one federated
site, `splitting` divides images into splits, `formats` reads and writes other formats, `lint` finds their faults, and `public_sets`
describes known ones. Bytes become pixels in `images`, which `image_headers` guards against hostile files. Out go the batches of
`dataset`, letterboxed (`letterbox`) or augmented (`augment`, by `augment_settings`), in `rectangles` of like aspect ratios, of sides
that grow (`progressive_resizing`), with images of further sets (`mix`); `image_folder` is that for classes of whole images. Open `dataset` first.
"""
