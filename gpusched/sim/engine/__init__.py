"""The event engine: compiled runs over arrays, advance -> decide -> apply.

In: a `build.World`. Out: a `state.Log`. `loop` is the one loop, `step` its clock, `pace` how fast jobs go. The decider
is compiled into it: `static` (orders that never change), `generic` (any order), `preempt`, or an agent; `mapped` calls
it from Python. Begin with `state`, then `loop`, then `static`.
"""
