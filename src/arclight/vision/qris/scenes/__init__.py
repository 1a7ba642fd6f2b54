"""Synthetic photos of payment codes: what is printed, where it lies, how a camera sees it, and the data set of it all."""
