"""The event engine: compiled runs over arrays, advance -> decide -> apply.

In: a `build.World`. Out: a `state.Log`. `step` is the clock, `pace` how fast jobs go; a run is `static` (orders that
never change), `generic` (any order), `mapped`, `preempt` or an agent's. Begin with `state`, then `step`, then
`static`.
"""
