"""Programs: exported models with a sealed description, run and timed without the model."""
