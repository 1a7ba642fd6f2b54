"""Server optimizers for pseudo-gradients. A strategy is its own settings: importing them imports no torch."""

from arclight.federated.strategies.adaptive import FedAdam as FedAdam
from arclight.federated.strategies.adaptive import FedYogi as FedYogi
from arclight.federated.strategies.rules import DiLoCo as DiLoCo
from arclight.federated.strategies.rules import FedAvg as FedAvg
from arclight.federated.strategies.rules import FedMomentum as FedMomentum
from arclight.federated.strategies.rules import FedNesterov as FedNesterov
from arclight.federated.strategies.rules import SparseLoCo as SparseLoCo
from arclight.federated.strategies.strategy import Strategy as Strategy

Strategies = FedAvg | FedMomentum | FedNesterov | FedAdam | FedYogi | DiLoCo | SparseLoCo
"""Those that a recipe can name, in lower case."""
