"""The command line: parse, call a service, show a view. Imports stay lazy.

In: words and files of a user. Out: an exit code, what views print. May import: everything. Begin with `main`; one
file per group of commands.
"""
