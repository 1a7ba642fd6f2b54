"""The server: it answers nodes, keeps what they send, folds, steps and commits."""
