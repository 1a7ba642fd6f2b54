"""``python -m arclight.cli`` is ``arclight``."""

import sys

from arclight.cli.command import main

sys.exit(main())
