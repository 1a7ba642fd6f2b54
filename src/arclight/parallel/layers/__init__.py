"""Cut the layers of a model over processes: tensor, context and expert parallelism."""
