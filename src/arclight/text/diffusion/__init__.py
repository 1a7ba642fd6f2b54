"""Images from text by flow matching.

`flux` is the transformer, from noisy image tokens and conditions to a velocity; `flow_matching` its loss, its times and its
sampler, and latents as tokens. Open `flux` first.
"""
