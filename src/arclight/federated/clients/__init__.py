"""A client: it trains on its own data from given weights, and gives back what has become of them."""

from arclight.federated.clients.learner import Learner as Learner
from arclight.federated.clients.learner import Outcome as Outcome
