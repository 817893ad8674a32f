# Runs the job's script on its first node; waits on the others for steps of srun. docs/decisions/0040 says why so.
spool=${0%/*}
. "$spool/settings"
PATH=$spool/bin:$PATH GPUSCHED_SPOOL=$spool GPUSCHED_RUN_PID=$$
export PATH GPUSCHED_SPOOL GPUSCHED_RUN_PID

if [ "$rank" != 0 ]; then
    python=$(command -v python3) && exec "$python" -I "$spool/lib/gpusched/nodes/batch/steps/serve.py"
    trap 'exit 0' HUP INT QUIT TERM # without python3 nothing can be started here from elsewhere: it is only held
    # shellcheck disable=SC2086
    trap '' USR1 USR2 ALRM TSTP $warning # these end nothing
    while :; do
        sleep 600 &
        wait $!
    done
fi

read -r program options <"$spool/script"
program=${program#\#!}
[ -n "$program" ] || program=${options%% *}
case $program in
/*) [ -x "$program" ] || { echo "gpusched: the job script begins with #!$program, which is not there" >&2; exit 127; } ;;
esac
case "$program $options" in # the profile that a login shell reads sets PATH anew
*bash*\ -*l*) [ -n "$BASH_ENV" ] || { BASH_ENV=$spool/login && export BASH_ENV; } ;;
esac

signal_all() { # SIGNAL [VARIABLE]: to all that the script started here and that have it, but srun, which forwards it
    for process in /proc/[0-9]*; do
        [ "$process" != "/proc/$script" ] && is_ours "$process" "$2" || continue
        case $(tr '\0' ' ' <"$process/cmdline") in *"$spool/lib/"*) ;; *) kill -s "$1" "${process#/proc/}" ;; esac
    done 2>/dev/null
}
is_ours() { # PROCESS [VARIABLE]
    [ -e "$1/exe" ] && variables=$(tr '\0' '\n' <"$1/environ") || return
    case $variables in *"GPUSCHED_SPOOL=$spool"*) ;; *) return 1 ;; esac
    case $variables in *"$2"*) ;; *) return 1 ;; esac
}
any_left() { # whether any process of the script is left
    for process in /proc/[0-9]*; do
        ! is_ours "$process" || return 0
    done 2>/dev/null
    return 1
}
# As in Slurm: what warns of the limit is for the steps, or for the script alone; what ends the job is for all of it.
handle_signal() {
    if [ "$1" != "$warning" ]; then
        ending=1
        # The script first: it is not to go on as if a step had ended by itself.
        [ -z "$script" ] || kill -s "$1" "$script" 2>/dev/null
        signal_all "$1"
    elif [ "$warned" = script ]; then
        kill -s "$1" "$script" 2>/dev/null
    else
        signal_all "$1" SLURM_STEP_ID=
    fi
}
ending= script=
for signal in HUP INT QUIT USR1 USR2 ALRM TERM TSTP CONT WINCH; do
    # shellcheck disable=SC2064
    trap "handle_signal $signal" "$signal"
done

# What a shell puts into the background ignores these two, and a script could not change that.
default= own=
env --default-signal=INT,QUIT true 2>/dev/null && default='env --default-signal=INT,QUIT'
# A session of its own: where the runtime signals our group, what it gets is ours to say.
command -v setsid >/dev/null && own=setsid
[ -z "$ending" ] || exit 143
$own $default "$spool/script" "$@" <&0 &
script=$!
unset GPUSCHED_SPOOL BASH_ENV
while :; do
    wait "$script" 2>/dev/null # some shells say what ended it
    code=$?
    [ "$code" -gt 128 ] || break
    kill -0 "$script" 2>/dev/null && continue # a signal for us ended the waiting
    wait "$script" 2>/dev/null
    again=$?
    [ "$again" = 127 ] || code=$again
    break
done
# The script's shell ends at once by TERM; what it has started may still save its work.
[ -z "$ending" ] || while any_left; do
    sleep 0.2 &
    wait $!
done
rm -rf -- "$GPUSCHED_JOB_DIR/.steps/$GPUSCHED_CONTAINER"
rmdir -- "$GPUSCHED_JOB_DIR/.steps" 2>/dev/null
exit "$code"
