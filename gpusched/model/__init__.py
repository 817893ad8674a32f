"""The words of gpusched: frozen, typed values without I/O."""
