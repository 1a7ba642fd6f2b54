"""Which client does what when, as a state machine without input or output, and the journal that it is brought back from.

`events` is the contract with whoever drives it, `driving` the right way to do so. `coordinator` puts together what nodes say
(`deciding`), what time and state demand (`ticking`), what lasts (`lasting`, of `records`) and what does not (`present`).
"""
