"""Serve a federated run: answer nodes, validate updates, aggregate rounds, publish weights.

In: messages of nodes (`protocol`) and uploaded blobs. Out: orders with manifests, and a checkpoint a round. Open `server` first
(the public `Server`), then `server_run` (a run in its folder, which makes all parts), `runtime` (drives the coordinator) and
`service` (answers nodes). An update goes through `service` > `validation` > `runtime` > journal > `server_step` >
`published_weights`. `secure_sums` relays keys and unmasks.
"""
