# Written by tests/compat/write_stubs.py from the table of names.
from arclight.serve.servable import ServableModule as ServableModule
from arclight.serve.servable import ServableModuleValidator as ServableModuleValidator
from . import servable_module as servable_module
from . import servable_module_validator as servable_module_validator

__all__ = [
    "ServableModule",
    "ServableModuleValidator",
]
