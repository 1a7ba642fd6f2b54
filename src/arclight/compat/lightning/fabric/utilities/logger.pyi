# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.params import add_prefix as __add_prefix
from arclight.trainer.loggers.params import convert_json_serializable as __convert_json_serializable
from arclight.trainer.loggers.params import convert_params as __convert_params
from arclight.trainer.loggers.params import flatten_dict as __flatten_dict
from arclight.trainer.loggers.params import sanitize_callable_params as __sanitize_callable_params
from arclight.trainer.loggers.params import sanitize_params as __sanitize_params

__all__ = [
]
_add_prefix = __add_prefix
_convert_json_serializable = __convert_json_serializable
_convert_params = __convert_params
_flatten_dict = __flatten_dict
_sanitize_callable_params = __sanitize_callable_params
_sanitize_params = __sanitize_params
