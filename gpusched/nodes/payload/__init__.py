"""What is executed on a node: standard library only, Python 3.6 syntax, sent there as it stands."""
