"""Vision tasks as ordinary modules and data modules, their settings, and their trained models as programs."""
