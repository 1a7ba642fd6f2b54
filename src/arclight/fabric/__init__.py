"""Where code runs: devices, precision, process groups, launchers, cluster environments, collectives, seeding."""
