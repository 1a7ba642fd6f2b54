"""Simulate a federation of any size on a virtual clock, with the coordinator of real runs.

`arclight.federated.simulate` is the door; `fleet` says what clients and lines are like, `sizes` what messages weigh, `server_costs`
measures this machine. `simulator` is the event loop, `result` what it reports.

`arclight.federated.simulate` is its door; `settings` says what a fleet is like.
"""

from arclight.federated.simulation.fleet import Costs, Fleet, Links, Speeds
