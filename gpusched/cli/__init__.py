"""The command line: parse arguments, call a service, show a view. Imports stay lazy.

In: arguments and files of a user. Out: an exit code, the printed views. May import: everything. Begin with `main`; one
file per group of commands.
"""
