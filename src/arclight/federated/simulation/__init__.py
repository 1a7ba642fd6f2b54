"""A federation of any size on a virtual clock."""
