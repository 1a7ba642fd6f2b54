"""Define server optimizers for pseudo-gradients (``server_optimizers``).

A strategy is its own settings: importing them imports no torch.
"""

from arclight.federated.strategies.server_optimizers import DiLoCo as DiLoCo
from arclight.federated.strategies.server_optimizers import FedAdam as FedAdam
from arclight.federated.strategies.server_optimizers import FedAvg as FedAvg
from arclight.federated.strategies.server_optimizers import FedMomentum as FedMomentum
from arclight.federated.strategies.server_optimizers import FedNesterov as FedNesterov
from arclight.federated.strategies.server_optimizers import FedYogi as FedYogi
from arclight.federated.strategies.server_optimizers import SparseLoCo as SparseLoCo
from arclight.federated.strategies.server_optimizers import Strategy as Strategy

Strategies = FedAvg | FedMomentum | FedNesterov | FedAdam | FedYogi | DiLoCo | SparseLoCo
"""Strategies that a recipe can name, in lower case."""
