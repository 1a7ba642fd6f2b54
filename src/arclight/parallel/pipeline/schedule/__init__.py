"""Order the actions of a pipeline step, check and simulate orders, and explain idle time."""
