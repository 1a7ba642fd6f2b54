"""Language models that see: an image encoder, a projector, and a language model's trunk."""
