# What jobs of the campaign run: sh job.sh SECONDS CODE [FILE, read into memory]. Lines go to the ledger beside it, one write each; each GPU's
# file is locked while a process of the attempt lives, so that two jobs on one GPU prove themselves.
here=${0%/*}
if [ -z "${GPUSCHED_JOB_ID:-}" ]; then # Slurm's own
    GPUSCHED_JOB_ID=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    GPUSCHED_JOB_ID=${GPUSCHED_JOB_ID:-$SLURM_JOB_ID} GPUSCHED_ATTEMPT=$((${SLURM_RESTART_COUNT:-0} + 1)) RANK=0
    GPUSCHED_NODE=$SLURMD_NODENAME GPUSCHED_GPUS=${SLURM_JOB_GPUS:-$CUDA_VISIBLE_DEVICES}
fi
say() {
    read -r up _ </proc/uptime
    echo "$1 $GPUSCHED_JOB_ID $GPUSCHED_ATTEMPT $RANK $GPUSCHED_NODE $up $2" >>"$here/ledger"
}
fd=5
for gpu in $(echo "$GPUSCHED_GPUS" | tr , ' '); do
    eval "exec $fd>>$here/gpus/$GPUSCHED_NODE.$gpu"
    $here/lock $fd || say clash "$gpu"
    fd=$((fd + 1))
done
say start "$GPUSCHED_GPUS"
[ -z "$3" ] || exec tail "$3"
sleep "$1"
say end "$2"
exit "$2"
