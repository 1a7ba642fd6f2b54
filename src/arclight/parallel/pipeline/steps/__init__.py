"""Run the steps of an ordinary module in stages, without changes to its code.

``parallelize_steps`` captures a step, lets ``auto_schedule`` choose, cuts the module (``pipelined_steps``) and shards what is left.
``micro_batch`` cuts batches, ``step_outputs`` merges logged values and outputs, ``module_state`` keeps attributes alike everywhere.
Open ``pipelined_steps.py`` first.
"""
