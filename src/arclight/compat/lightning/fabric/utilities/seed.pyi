# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.seeding import isolate_rng as isolate_rng
from arclight.fabric.seeding import MAX_SEED as max_seed_value
from arclight.fabric.seeding import seed_loader_worker as pl_worker_init_function
from arclight.fabric.seeding import reset_seed as reset_seed
from arclight.fabric.seeding import seed_everything as seed_everything

__all__ = [
    "isolate_rng",
    "max_seed_value",
    "pl_worker_init_function",
    "reset_seed",
    "seed_everything",
]
