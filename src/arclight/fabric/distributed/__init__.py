"""Form and watch a process group: rendezvous, stop signals, hang reports, sharding.

In: ranks that a launcher started; out: one process group that exchanges values, stops together, explains a hang.

Open ``rendezvous`` first: how ranks find each other. ``watchdog`` is the thread beside each rank (``hang_report`` says where a rank waits,
``stop_signal`` is what it carries), ``store_gather`` collects values without a collective. ``sharding`` gathers and shards DTensors
(``dtensor`` works on them without importing torch.distributed, ``shard_regions`` computes which parts a rank holds),
``optimizer_names`` keys optimizer state by parameter name. ``fabric.strategies`` calls most of it.
"""
