"""Train one model on the data of many sites: ``arclight federate``.

A recipe (`recipe`) comes in; a run folder with rounds, history and report goes out. Open `federated_run` first: it runs a recipe in this
process, and opens the run that `network` serves to nodes, which join by `network`, too. `sites` builds what clients train, `progress` and
`run_report` show a run. `keys` and `flower` are verbs of their own, `rounds` those of ``arclight checkpoint``.
"""
