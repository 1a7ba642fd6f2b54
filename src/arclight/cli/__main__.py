"""Run ``arclight`` as ``python -m arclight.cli``.

Calls `main` of ``cli.command`` and nothing else.
"""

import sys

from arclight.cli.command import main

sys.exit(main())
