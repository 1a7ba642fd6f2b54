"""Simulate a federation of any size on a virtual clock, with the coordinator of real runs.

Open `simulate` first, the public function; `fleet` describes clients and network links, `sizes` computes bytes of messages,
`server_costs` measures this machine. `simulator` is the event loop, `result` what it reports.
"""

from arclight.federated.simulation.fleet import Costs, Fleet, Links, Speeds
