"""Other projects' names over our rooms: :mod:`arclight.compat.lightning` stands in for ``lightning``."""
