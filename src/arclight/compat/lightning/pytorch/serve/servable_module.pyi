# Written by tests/compat/write_stubs.py from the table of names.
from arclight.serve.servable import ServableModule as ServableModule

__all__ = [
    "ServableModule",
]
