"""How tensors are written for the wire, and back; each is a property of a manifest's entry, so that a fleet may mix them."""
