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
keeper() { # NAME PID: as in ends.py, "PID STARTTIME"; ended: nothing is left to wait for; "" where nothing is known
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
waiting() { # NAME:PID..., which become NAME:PID:KEEPER:STARTTIME
    while [ $# -gt 0 ]; do
        count=$#
        while [ "$count" -gt 0 ]; do
            word=$1
            shift
            count=$((count - 1))
            case $word in
            *:*:*) ;;
            *) word=$word:$(keeper "${word%:*}" "${word#*:}" | tr ' ' :) ;;
            esac
            asked=${word#*:}
            asked=${word%%:*}:${asked%%:*}
            now=${word#"$asked:"}
            if [ "$now" = ended ] || { [ -n "$now" ] && [ "$(field "${now%:*}" 20)" != "${now#*:}" ]; }; then
                echo "$asked"
            elif [ -n "$now" ]; then
                set -- "$@" "$word"
            fi
        done
        [ $# = 0 ] || sleep 1
    done
}
child= heard=
rm -f "$root/ended"
if mkfifo -m 600 "$root/ended" 2>/dev/null; then
    cat 0<>"$root/ended" &
    heard=$!
fi
while read -r list; do
    [ -z "$child" ] || kill "$child" 2>/dev/null
    waiting $list </dev/null &
    child=$!
done
[ -z "$child" ] || kill "$child" 2>/dev/null
[ -z "$heard" ] || kill "$heard" 2>/dev/null
rm -f "$root/ended"
