"""Decide if an anchor fits a box, alike for training, lint and settings; without torch.

``models.anchors`` and ``models.loss`` match by these, ``data.lint.checks`` warns by them, ``tasks.settings`` has the first as a default.
"""

from __future__ import annotations

ANCHOR_T = 4.0
"""An anchor is matched with boxes less than this many times wider, narrower, taller or flatter than itself."""
GOOD_RECALL = 0.98
"""Share of boxes that some anchor should match; below it, new anchors are fitted."""
