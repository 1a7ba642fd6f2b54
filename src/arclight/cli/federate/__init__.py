"""``arclight federate``: train one model on the data of many sites. Open `federated_run` first."""
