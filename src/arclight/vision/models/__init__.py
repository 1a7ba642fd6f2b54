"""Networks of the vision tasks: architectures, their anchors and their losses."""
