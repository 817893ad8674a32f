"""Effects of reservations on a decision: which job may start where, until when, and what waits for their end.

In: a snapshot's reservations. Out: for each job the nodes that it may use now, as rows of the masks that all passes go
by, and what a pass that looks ahead needs. May import: model, sched.state, compiled. Begin with: rules.py.
"""
