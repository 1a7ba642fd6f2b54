"""Which tensors travel in which round: filters, periods, fragments, personal and random layers, experts. Names, never positions."""
