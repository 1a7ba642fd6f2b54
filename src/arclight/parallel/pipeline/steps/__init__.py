"""Run the steps of an ordinary module in stages."""
