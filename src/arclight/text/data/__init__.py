"""Turn text into batches for a model: documents become tokens, tokens become batches.

Files come in through `sources` (Mosaic data shards through `mds`); `tokenizer` turns their text into ids; `corpus` keeps these
in shards on disk; `site_split` picks the documents of one federated site. Out go the batches of `data_module`, as
`data_settings` says. `public_corpora` describes what others publish. Open `data_module` first.
"""
