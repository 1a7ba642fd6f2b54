"""Find the installed distribution of this package, whose name differs from the import name.

Errors that name a missing extra print `pip_install`; ``arclight doctor`` and run folders record `distribution`. Ask it instead of writing
the name of a distribution elsewhere.
"""

from __future__ import annotations

from importlib.metadata import entry_points

NAME = "arclight-torch"
"""Name of the distribution on the public index, where another project is called arclight; used in messages if none is installed."""


def distribution() -> str:
    """Return the name of the installed distribution that has the ``arclight`` command."""
    commands = entry_points(group="console_scripts", name="arclight")
    names = [one.dist.name for one in commands if one.value == "arclight.cli:main" and one.dist is not None]
    return NAME if NAME in names or not names else names[0]


def pip_install(*extras: str) -> str:
    """Return the pip command that installs what ``extras`` need."""
    return f'pip install "{distribution()}[{",".join(extras)}]"'
