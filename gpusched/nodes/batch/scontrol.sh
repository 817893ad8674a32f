# What job scripts ask scontrol: to queue the job again, and the names of its nodes, one in a line.
case "$1 $2" in
"show hostname" | "show hostnames") ;;
"requeue "*)
    program=scontrol
    . "$GPUSCHED_SPOOL/ask"
    ;;
*)
    echo 'scontrol: inside a job only "scontrol requeue JOB" and "scontrol show hostnames [LIST]" are answered; for the rest there is gpusched, on the login node' >&2
    exit 1
    ;;
esac
numbered() { # FIRST-LAST: the numbers, as wide as the first
    first=${1%-*} last=${1#*-}
    case $first$last in '' | *[!0-9]*) echo "scontrol: invalid host list" >&2 && return 1 ;; esac
    [ "$first" != "$last" ] || { echo "$first" && return; }
    width=${#first}
    for end in first last; do
        eval "text=\$$end"
        while [ "${text#0}" != "$text" ] && [ -n "${text#0}" ]; do text=${text#0}; done
        eval "$end=\$text"
    done
    while [ "$first" -le "$last" ]; do
        printf "%0${width}d\n" "$first"
        first=$((first + 1))
    done
}
expand() { # NAME with any number of [1-3,7]
    case $1 in *\[*\]*) ;; *) echo "$1" && return ;; esac
    ranges=${1#*\[}
    ranges=${ranges%%\]*}
    (IFS=, && for range in $ranges; do numbered "$range" || exit; done) | while read -r number; do
        (expand "${1%%\[*}$number${1#*\]}")
    done
}
rest=${3-$SLURM_JOB_NODELIST} name=
while [ -n "$rest" ]; do
    piece=${rest%%,*}
    name=$name$piece
    [ "$piece" = "$rest" ] && rest= || rest=${rest#*,}
    open=${name##*\]}
    case $open in *\[*) [ -z "$rest" ] || { name=$name, && continue; } ;; esac
    [ -z "$name" ] || expand "$name"
    name=
done
