"""The command line: parse, call a service, show a view. Imports stay lazy."""
