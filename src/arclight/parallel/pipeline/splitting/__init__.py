"""Cut a model into stages."""
