"""Fuzzed inputs at every door: ``python -m tests.fuzz --target all --inputs 1000000 --seed 1``.

targets.py: per door valid seeds, and the public function that the CLI or the controller calls. mutating.py: inputs made
of them. running.py: limits per input, what counts as a defect, the shortest input that shows it.
"""
