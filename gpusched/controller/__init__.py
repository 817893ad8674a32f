"""The controller: one cycle (observe, decide, check, apply, record), run for ever or once."""
