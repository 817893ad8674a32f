# What ends.py does, on a node without python3: it looks at /proc once a second. $1: CLUSTER/NODE. Launchers of plain
# processes say it at once: they write to the pipe "ended" ("NAME:", see supervised.py), which is held open here.
root=${XDG_STATE_HOME:-$HOME/.local/state}/gpusched-node/$1
field() { # PID NUMBER: of its stat, counted from its state
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    number=$2
    set -- ${stat##*) }
    [ "$1" != Z ] || return 1
    shift $((number - 1))
    echo "$1"
}
end_recorder() { # NAME PID: as in ends.py, "PID STARTTIME"; ended: nothing is left to wait for; "" where nothing is known
    if read -r pid since <"$root/$1/launcher.pid" && [ "$(field "$pid" 20)" = "$since" ]; then
        echo "$pid $since"
        return
    fi 2>/dev/null
    [ "$2" != -1 ] || return 0
    [ "$2" != 0 ] || { echo ended && return; }
    pid=$2 parent=$(field "$2" 2)
    case $(cat "/proc/${parent:-0}/comm" 2>/dev/null) in conmon | containerd-shim*) pid=$parent ;; esac
    since=$(field "$pid" 20) && echo "$pid $since" || echo ended
}
watch() { # NAME:PID..., which become NAME:PID:RECORDER:STARTTIME
    while [ $# -gt 0 ]; do
        count=$#
        while [ "$count" -gt 0 ]; do
            word=$1
            shift
            count=$((count - 1))
            case $word in
            *:*:*) ;;
            *) word=$word:$(end_recorder "${word%:*}" "${word#*:}" | tr ' ' :) ;;
            esac
            job=${word#*:}
            job=${word%%:*}:${job%%:*}
            recorder=${word#"$job:"} # the process to watch, found when the job came into the list
            [ -n "$recorder" ] || continue
            if [ "$recorder" = ended ] || [ "$(field "${recorder%:*}" 20)" != "${recorder#*:}" ]; then
                echo "$job"
            else
                set -- "$@" "$word"
            fi
        done
        [ $# = 0 ] || sleep 1
    done
}
watcher= pipe_reader=
rm -f "$root/ended"
if mkfifo -m 600 "$root/ended" 2>/dev/null; then
    cat 0<>"$root/ended" &
    pipe_reader=$!
fi
while read -r list; do
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null
    watch $list </dev/null & # a new list replaces the one before
    watcher=$!
done
[ -z "$watcher" ] || kill "$watcher" 2>/dev/null
[ -z "$pipe_reader" ] || kill "$pipe_reader" 2>/dev/null
rm -f "$root/ended"
