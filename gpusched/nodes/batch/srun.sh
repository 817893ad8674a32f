# Starts tasks of a step. With python3 all of it; without, tasks on this node, by the few options that need no more.
spool=$GPUSCHED_SPOOL
python=$(command -v python3) && exec "$python" -I "$spool/lib/gpusched/nodes/batch/steps/srun.py" "$@"
. "$spool/settings"
refuse() { echo "srun: error: $1; nothing was started" >&2; exit 2; }
number() { case $2 in '' | *[!0-9]* | 0*) refuse "$1: found \"$2\", expected a number" ;; esac; }
tasks= per_node=
while [ $# -gt 0 ]; do
    case $1 in
    --) shift && break ;;
    -n | -N | -c | --ntasks | --nodes | --ntasks-per-node | --cpus-per-task) option=$1 value=$2 && shift 2 ;;
    --ntasks=* | --nodes=* | --ntasks-per-node=* | --cpus-per-task=*) option=${1%%=*} value=${1#*=} && shift ;;
    -n* | -N* | -c*) value=${1#-?} option=${1%"$value"} && shift ;;
    -u | --unbuffered | -Q | --quiet | -v | --verbose) shift && continue ;;
    -*) refuse "$1 needs python3, which the image does not have" ;;
    *) break ;;
    esac
    number "$option" "$value"
    case $option in
    -n | --ntasks) tasks=$value ;;
    --ntasks-per-node) per_node=$value ;;
    -N | --nodes) [ "$value" = 1 ] || refuse "steps on other nodes need python3, which the image does not have" ;;
    esac
done
[ $# -gt 0 ] || refuse "no command given"
[ "$nodes" = 1 ] || refuse "steps of jobs on several nodes need python3, which the image does not have"
tasks=${tasks:-${per_node:-$tasks_per_node}}
step=0
steps=$GPUSCHED_JOB_DIR/.steps/$GPUSCHED_CONTAINER
mkdir -p "$steps" || exit 1
while ! mkdir "$steps/step-$step" 2>/dev/null && [ -d "$steps/step-$step" ]; do step=$((step + 1)); done
task() { # NUMBER COMMAND...
    export SLURM_STEP_ID=$step SLURM_STEPID=$step SLURM_NTASKS=$tasks SLURM_NPROCS=$tasks SLURM_STEP_NUM_TASKS=$tasks
    export SLURM_PROCID=$1 SLURM_LOCALID=$1 SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURM_TASKS_PER_NODE=$tasks
    export RANK=${RANK-$1} LOCAL_RANK=${LOCAL_RANK-$1} WORLD_SIZE=${WORLD_SIZE-$tasks} NODE_RANK=${NODE_RANK-0}
    shift
    exec "$@"
}
[ "$tasks" -gt 1 ] || task 0 "$@"
pids= highest=0 id=0
while [ "$id" -lt "$tasks" ]; do
    (task "$id" "$@") &
    pids="$pids $!" id=$((id + 1))
done
id=0
for pid in $pids; do
    wait "$pid"
    code=$?
    [ "$code" = 0 ] || echo "srun: error: $node: task $id: Exited with exit code $code" >&2
    [ "$code" -le "$highest" ] || highest=$code
    id=$((id + 1))
done
exit "$highest"
