"""Files and names from outside as validated values: inventory.yaml, policies, trained weights, paths, users.

In: YAML and safetensors files, environment. Out: frozen values of `gpusched.model`, or one line with file, line and
key. May import: model. Begin with `inventory.load_inventory`; `policies` reads policy files, `yamlfile` knows
positions.
"""
