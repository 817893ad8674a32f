"""Components for gpusched, one module each, as somebody else would write them."""
