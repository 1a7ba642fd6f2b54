# Written by tests/compat/write_stubs.py from the table of names.
from arclight._lazy import Refused as _Refused

__all__ = [
]
class SingleDeviceXLAStrategy(_Refused): ...
