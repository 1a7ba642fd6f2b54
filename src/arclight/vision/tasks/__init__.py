"""Vision tasks as ordinary modules and data modules, as a user would write them.

A recipe's `settings` come in; `detection` makes a Detector and its data of them. `processing` is what lies around the network,
in training and in deployed programs alike: photos to input, output to boxes. `deployment` writes a trained detector as a
program and measures one. Open `detection` first.
"""
