# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.memory import free_memory as garbage_collection_cuda
from arclight.fabric.memory import is_out_of_device_memory as is_cuda_out_of_memory
from arclight.fabric.memory import is_out_of_library_memory as is_cudnn_snafu
from arclight.fabric.memory import is_out_of_memory as is_oom_error
from arclight.fabric.memory import is_out_of_host_memory as is_out_of_cpu_memory
from arclight.compat.lightning.utilities import recursive_detach as recursive_detach

__all__ = [
    "garbage_collection_cuda",
    "is_cuda_out_of_memory",
    "is_cudnn_snafu",
    "is_oom_error",
    "is_out_of_cpu_memory",
    "recursive_detach",
]
