"""What the server cannot see, and what nobody can tell from the model: secure sums, clipping and noise, robust means."""
