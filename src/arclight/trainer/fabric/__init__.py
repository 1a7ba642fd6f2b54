"""Fabric: devices, precision and processes for a loop of the user's own. Open ``fabric`` first; ``wrappers`` are what it gives back."""
