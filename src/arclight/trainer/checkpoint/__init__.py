"""Save and restore a Trainer: in comes its state, out go folders or files, and back; open ``state`` first."""
