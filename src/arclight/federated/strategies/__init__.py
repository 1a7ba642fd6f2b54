"""Server optimizers for pseudo-gradients. A strategy is its own settings: importing them imports no torch."""

from arclight.federated.strategies.adaptive import FedAdam, FedYogi
from arclight.federated.strategies.rules import DiLoCo, FedAvg, FedMomentum, FedNesterov, SparseLoCo
from arclight.federated.strategies.strategy import Strategy

Strategies = FedAvg | FedMomentum | FedNesterov | FedAdam | FedYogi | DiLoCo | SparseLoCo
"""Those that a recipe can name, in lower case."""
