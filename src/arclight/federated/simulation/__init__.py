"""A federation of any size on a virtual clock: the coordinator of real runs, with simulated clients and lines.

`arclight.federated.simulate` is its door; `settings` says what a fleet is like.
"""

from arclight.federated.simulation.fleet import Costs, Fleet, Links, Speeds
