"""Run the ``arclight`` command: parse arguments and dispatch to the verbs.

The command line comes in through `command`, which calls a verb of `commands`, `comparing`, `tune`, `federate` or `plan` (the last four are
verbs of several modules). `arguments` reads recipes and options by `schema`, `run_setup` makes a run of them; `user_module` and `user_run` make
one of a user's own classes. For all verbs: `help` and `style` are what a terminal shows, `interruption` handles Ctrl-C, `runs` finds run
folders and checkpoints, `run_record` writes beside a run what repeats it, `quantization` reads the recipe of ``arclight quantize``. Open
`command` first.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.cli.command import main as main
    from arclight.cli.schema import Recipe as Recipe

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Recipe": "arclight.cli.schema",
        "main": "arclight.cli.command",
    },
)
