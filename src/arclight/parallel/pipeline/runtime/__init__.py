"""Run stages by a schedule over processes."""
