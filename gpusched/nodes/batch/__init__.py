"""Job scripts on their nodes: the files of a job's spool folder, and what stands for srun and scontrol there.

In: the script's text, what the job was given. Out: files by name, which a runtime shows to the job.
May import: model. What lies in steps/ runs inside jobs: stdlib, Python 3.6 and later. Begin with `spool.spool_files`.
"""
