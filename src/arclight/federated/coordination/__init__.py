"""Coordinate rounds: a state machine without I/O, and the journal that restores it.

In: events (`events`): messages of nodes, the time, and what the driver has done. Out: records for the journal and commands to execute.
Open `coordinator` first. The rules form a straight line: `situation` (all that a decision depends on), `answers`, `round_rules` (rounds
and timers), `message_rules` (nodes and the driver), `coordinator`. State is of two kinds: `run_state` is durable, a function of the settings
and the journal's `records`; `cluster` holds the nodes that are connected now. `sampling` draws a round's clients, `settings` is what a recipe
may set. `run_database` keeps journal and history in one SQLite file.
"""
