# A script is read where it is submitted, by gpusched's own parser, which is not in the image.
echo 'sbatch: error: no job can be queued from inside a job; queue it before: gpusched submit --dependency afterany:JOB, or --chain' >&2
exit 1
