"""``python -m arclight.cli`` is ``arclight``.

Calls `main` of ``cli.command`` and nothing else.
"""

import sys

from arclight.cli.command import main

sys.exit(main())
