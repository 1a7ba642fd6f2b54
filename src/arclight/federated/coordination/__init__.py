"""Which client does what when, as a state machine without input or output, and the journal that it is brought back from."""
