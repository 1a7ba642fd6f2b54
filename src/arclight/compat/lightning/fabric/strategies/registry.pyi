# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.strategies.strategy_registry import StrategyRegistry as __StrategyRegistry

__all__ = [
]
_StrategyRegistry = __StrategyRegistry
