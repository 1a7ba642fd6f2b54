"""Cut a traced graph of operations into stages, where modules cannot be cut."""
