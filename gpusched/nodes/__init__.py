"""How gpusched reaches its nodes and reads them."""
