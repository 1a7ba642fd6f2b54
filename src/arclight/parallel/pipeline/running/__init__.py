"""Stages run by a schedule over processes: micro-batches there and back, sums that several processes share, and what is said when one fails."""
