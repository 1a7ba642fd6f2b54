# Written by tests/compat/write_stubs.py from the table of names.
from arclight.serve.servable import ServableModuleValidator as ServableModuleValidator

__all__ = [
    "ServableModuleValidator",
]
