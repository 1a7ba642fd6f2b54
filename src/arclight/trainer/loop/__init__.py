"""Run the training loop: in come settings, module and data, out go weights, progress and hook calls; open ``fit`` first."""
