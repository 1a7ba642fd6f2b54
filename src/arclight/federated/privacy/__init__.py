"""Protect updates: secure aggregation, differential privacy, robust aggregation.

`secure_aggregation` masks and unmasks with keys of `key_agreement`; `noise` clips, adds noise and accounts epsilon; both draw from
`random_stream`. `robust` has medians and Krum, `settings` what a recipe may set.
"""
