"""Job scripts: the options in their lines.

In: a script (file, stdin, ``--wrap``), what was typed on the command line, the inventory. Out: the options of
``submit`` by name, each with the line that it stands in, notes, errors with file, line and option.
May import: the table of options (`client.request`), slurm, config, model; how words are read as options comes in as a
function. Begin with `layers.read_options`, then `sbatch`, the table of sbatch's options.
"""
