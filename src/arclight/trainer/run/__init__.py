"""Keep what a run leaves behind: folder, log paths, report; open ``folder`` first."""
