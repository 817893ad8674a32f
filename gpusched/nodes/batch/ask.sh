# Asks the controller, by a file in the job's own folder that it reads with the node, and prints its answer, another file.
# The program's name is in $program. docs/decisions/0058 says why so.
trap '' HUP INT QUIT TERM USR1 USR2 # what is asked for may end the job, and the answer is still to be heard
umask 022
fail() { echo "$program: error: $1" >&2; exit 1; }
. "$GPUSCHED_SPOOL/settings" || fail "this is no job script of gpusched"
[ "$rank" = 0 ] || fail "it is answered on the first node of the job only"
folder=$GPUSCHED_JOB_DIR lock=$GPUSCHED_JOB_DIR/.asking.$GPUSCHED_ATTEMPT
escaped() { LC_ALL=C sed 's/[\\"]/\\&/g'; }
words="\"$program\""
for word in "$@"; do words=$words,\"$(printf '%s' "$word" | escaped)\"; done
[ "${#words}" -le 3900 ] || fail "its arguments are too long"
alive() { read -r _ _ state _ <"/proc/$1/stat" && [ "$state" != Z ]; } 2>/dev/null
tries=0
until ln -sn "$$" "$lock" 2>/dev/null; do # one asks at a time
    tries=$((tries + 1)) holder=$(readlink "$lock")
    # One that was killed leaves its lock; of those that see it one at a time looks again and removes it.
    if [ -n "$holder" ] && ! alive "$holder" && ln -sn "$$" "$lock.$holder" 2>/dev/null; then
        [ "$(readlink "$lock")" != "$holder" ] || rm -f "$lock.script" "$lock"
        rm -f "$lock.$holder"
        continue
    fi
    [ "$tries" -le 600 ] || fail "another one waits for the controller, too"
    sleep 0.2
done
finish() { rm -f "$folder/ask.json" "$folder/ask.json.part" "$lock.script" "$lock"; }
give_up() { finish && fail "$1"; }
request() {
    printf '{"id":"%s","attempt":%s,"words":[%s]' "$id" "$GPUSCHED_ATTEMPT" "$words"
    printf ',"cwd":"%s"' "$(printf '%s' "$PWD" | escaped)"
    [ ! -e "$lock.script" ] || { printf ',"script_word":%s,"script":"' "$number" && escaped <"$lock.script" && printf '"'; }
    echo '}'
}
ask() { # ID
    id=$1 tries=0 answered=
    request >"$folder/ask.json.part" && mv "$folder/ask.json.part" "$folder/ask.json" || give_up "cannot write to $folder"
    until [ "$answered" = "$id" ]; do
        tries=$((tries + 1))
        [ "$tries" -le 450 ] || give_up "the controller has not answered"
        sleep 0.2
        { read -r answered code <"$folder/answer"; } 2>/dev/null
    done
}
random=$(od -An -N4 -tu4 /dev/urandom 2>/dev/null) # of the id that sbatch's job gets: others must not foresee it
ask "$$${random##* }-$(date +%s)"
if [ "$program $code" = "sbatch 3" ]; then # it has read the options: this word is the script; 0: it is on stdin
    number=$(sed 1d "$folder/answer") file=/dev/stdin
    [ "$number" = 0 ] || { shift $((number - 1)) && file=$1; }
    if [ "$number" = 0 ]; then head -c 65537; else head -c 65537 <"$file"; fi >"$lock.script" 2>/dev/null ||
        give_up "Unable to open file $file"
    [ "$(wc -c <"$lock.script")" -le 65536 ] || give_up "the script has more than 64 KiB; put data into separate files"
    ask "0$id"
fi
to=1
[ "$code" = 0 ] || to=2
sed 1d "$folder/answer" >&$to
finish
exit "$code"
