"""The verbs of ``arclight``: one module for each, named as it is typed."""
