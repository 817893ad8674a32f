# The attempts of one installation, for a node without python3; gpusched/nodes/runtimes/listing.py reads what this prints.
# BOUNDED of runtimes/shell.py is before it. Variables: CLUSTER_ID, NODE, RUNTIME, and ROOT, the folder of the attempts
# (empty: the usual one).
# Every line begins with its own word, so that no file's content can be taken for another's.
attempts_root=${ROOT:-${XDG_STATE_HOME:-$HOME/.local/state}/gpusched-node/$CLUSTER_ID/$NODE}
attempts_boot=$(cat /proc/sys/kernel/random/boot_id)
attempts_now=$(date +%s)
read -r attempts_up attempts_idle </proc/uptime
prefixed() { sed "s/^/$1 /"; }
file_line() { [ ! -e "$1/$2" ] || printf '%s %s\n' "$2" "$(head -n 1 "$1/$2" 2>/dev/null)"; }
start_time() {
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    set -- ${stat##*) }
    [ "$1" != Z ] && echo "${20}"
}
group_alive() { # PID STARTTIME of a leader, as in payload/attempts.py
    [ "${1:-0}" -gt 1 ] 2>/dev/null || return 1
    now=$(start_time "$1") && { [ "$now" = "$2" ]; return; } # it may have no group of its own yet
    kill -0 "-$1" 2>/dev/null
}
job_files() { # FOLDER of an attempt: as in payload/jobfiles.py
    grep -qx 'rank=0' "$1/meta" 2>/dev/null && job_dir=$(sed -n 's/^job_dir=//p' "$1/meta") && [ -n "$job_dir" ] || return 0
    case $job_dir in "$attempts_root"/* | /var/lib/gpusched-node/*) ;; *) # a shared disk may hang: once is enough
        [ -n "$hung" ] || bounded 2 stat "$job_dir" >/dev/null 2>&1 || { [ $? != 1 ] || return 0; hung=1; }
        [ -z "$hung" ] || { printf 'progress %s 0 !its disk does not answer\n' "${1##*/}"; return 0; } ;;
    esac
    for job_file in progress saved ask; do
        file=$job_dir/$job_file.json
        [ -e "$file" ] || [ -L "$file" ] || continue
        # One look, as it may be taken back at any time. In hexadecimal the mode of a regular file begins with 8.
        facts=$(stat -c '%f %Y %s' "$file" 2>/dev/null) || continue
        age=0 max_bytes=4096
        [ "$job_file" != ask ] || max_bytes=150000
        if [ "${facts#8}" = "$facts" ]; then text='!it is not a regular file'
        elif [ "${facts##* }" -gt "$max_bytes" ]; then text="!it is larger than $max_bytes bytes"
        else
            modified=${facts#* }
            age=$((attempts_now - ${modified% *}))
            [ "$age" -ge 0 ] || age=0
            if [ "$job_file" != ask ]; then text=$(bounded 2 head -c 4096 "$file" 2>/dev/null | tr '\n\r' '  ' | tr -cd ' -~')
            else # a script in it arrives as it is
                text=$(bounded 2 head -c "$max_bytes" "$file" 2>/dev/null | od -An -v -tx1 | tr -d ' \n')
                [ "${#text}" -le 8192 ] || large=$((large + 1))
                [ "${#text}" -le 8192 ] || [ "$large" -le 3 ] || continue
            fi
            [ -n "$text" ] || [ -e "$file" ] || continue
        fi
        printf '%s %s %s %s\n' "$job_file" "${1##*/}" "$age" "$text"
    done
}
list_folder() {
    printf 'attempt %s\n' "${1##*/}"
    prefixed meta <"$1/meta" 2>/dev/null
    modified=$(stat -c %Y "$1" 2>/dev/null) || modified=0
    [ $((attempts_now - modified)) -ge 30 ] || echo new
    for file in launcher.pid ready go; do [ ! -e "$1/$file" ] || echo "file $file"; done
    attempt_boot=
    grep -qx "boot=$attempts_boot" "$1/meta" 2>/dev/null && attempt_boot=same && echo same_boot
    leader= since=
    read -r leader since 2>/dev/null <"$1/launcher.pid"
    [ -n "$attempt_boot" ] && group_alive "$leader" "$since" && echo launcher
    # After the look for the launcher, who writes them just before it goes.
    for file in started exit failed pid; do file_line "$1" "$file"; done
    [ ! -e "$1/failed" ] || tail -n 8 "$1/start.err" 2>/dev/null | cut -c 1-1000 | prefixed error
    [ -n "$attempt_boot" ] || return 0
    noted=
    read -r noted 2>/dev/null <"$1/attached"
    case ${noted%.*} in '' | *[!0-9]*) ;; *) echo "attached $((${attempts_up%.*} - ${noted%.*}))" ;; esac
    leader= since=
    read -r leader since 2>/dev/null <"$1/pid"
    [ -n "$leader" ] && [ "$(start_time "$leader")" = "$since" ] && echo pid_alive
}
engine() { # killed, as busybox's timeout does not say 124 after TERM
    if command -v timeout >/dev/null 2>&1; then timeout -s KILL 8 "$RUNTIME" "$@"; else "$RUNTIME" "$@"; fi
}
containers() { engine ps -a "$@" --filter "label=gpusched.cluster=$CLUSTER_ID" --filter "label=gpusched.node=$NODE"; }
conmon_of() { # CONTAINER: whether a conmon waits for its end
    for conmon in $(grep -l -x conmon /proc/[0-9]*/comm 2>/dev/null); do
        ! grep -q -z -x -F -e "$1" "${conmon%comm}cmdline" 2>/dev/null || return 0
    done
    return 1
}
lost_containers() { # as in payload/engines.py: those whose end nobody saw, and that podman says to run
    containers --no-trunc --filter status=running --format '{{.ID}} {{.Pid}}' | while read -r id pid; do
        if start_time "$pid" >/dev/null; then
            ! grep -q -e "$id" "/proc/$pid/cgroup" || continue
            ! grep -q -a -e GPUSCHED_CONTAINER= "/proc/$pid/environ" || continue
        fi
        ! conmon_of "$id" || continue
        [ -z "$(containers -q --filter status=running --filter "id=$id")" ] || echo "lost $id"
    done
}
docker_containers() {
    ids=$(containers -q --no-trunc) || return
    [ -n "$ids" ] || return 0
    # shellcheck disable=SC2086
    found=$(engine container inspect $ids) && printf '%s\n' "$found"
}
list_engine() {
    case $RUNTIME in
    podman)
        containers --format json || return
        ids=$(containers -q --no-trunc --filter status=exited) || return
        # shellcheck disable=SC2086
        [ -z "$ids" ] || engine container inspect --format 'oom {{.Id}} {{.State.OOMKilled}}' $ids 2>/dev/null
        lost_containers
        ;;
    docker) # a container that is removed meanwhile makes it fail
        docker_containers || { code=$?; case $code in 124 | 137) return $code ;; esac; docker_containers || return; }
        ;;
    esac
    return 0
}
for folder in "$attempts_root"/gpusched-*; do
    [ ! -d "$folder" ] || list_folder "$folder"
done
case $RUNTIME in
podman | docker)
    listing=$(list_engine 2>/dev/null)
    case $? in
    0) printf '%s\n' "$listing" | prefixed engine ;;
    124 | 137) echo "engine_error $RUNTIME did not answer within 8 s" ;;
    127) echo "engine_error $RUNTIME: No such file or directory" ;;
    *) { echo "$RUNTIME:"; list_engine 2>&1 >/dev/null | tail -n 5; } | cut -c 1-1000 | prefixed engine_error ;;
    esac
    # Looked for last: they are written just before the engine reports the end.
    for folder in "$attempts_root"/gpusched-*/oom; do
        [ ! -e "$folder" ] || { folder=${folder%/oom} && echo "oom ${folder##*/}"; }
    done
    ;;
esac
all_job_files() { # FOLDER...: beginning with any, as of large requests only some are read
    hung= large=0 skipped=$(($(od -An -N2 -tu2 /dev/urandom) % $#))
    while [ "$skipped" -gt 0 ]; do skipped=$((skipped - 1)) && set -- "$@" "$1" && shift; done
    for folder; do job_files "$folder"; done
}
all_job_files "$attempts_root"/gpusched-*
for folder in "$attempts_root"/jobs/* "/var/lib/gpusched-node/$CLUSTER_ID/$NODE"/*; do
    [ ! -d "$folder" ] || [ -n "$(find "$attempts_root" -maxdepth 1 -name "gpusched-${folder##*/}-*" | head -n 1)" ] ||
        echo "job_folder ${folder##*/}"
done
echo attempts_end
