"""The ``arclight`` command: one verb for each thing a person does with a recipe, a program, a photo or a checkpoint."""

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
