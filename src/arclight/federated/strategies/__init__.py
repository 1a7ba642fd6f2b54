"""Server optimizers for pseudo-gradients."""

from arclight.federated.strategies.rules import FedAvg
from arclight.federated.strategies.strategy import Strategy
