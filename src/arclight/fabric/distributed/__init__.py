"""Several processes: how they meet, exchange values, stop together and explain a hang; tensors that are sharded over them."""
