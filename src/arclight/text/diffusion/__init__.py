"""Generate images from text by flow matching.

`flux` is the transformer, from noisy image tokens and conditions to a velocity; `flow_matching` has its loss, its times and its
sampler, and turns latents into tokens. Open `flux` first.
"""
