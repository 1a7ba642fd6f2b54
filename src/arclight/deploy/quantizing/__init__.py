"""Quantization of exported graphs: where integers begin and end, how ranges are found, and the post-training recipe."""
