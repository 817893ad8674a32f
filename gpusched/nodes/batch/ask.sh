# Asks the controller, by a file in the job's own folder that it reads with the node, and prints its answer, another file.
# The program's name is in $program. docs/decisions/0058 says why so.
trap '' HUP INT QUIT TERM USR1 USR2 # what is asked for may end the job, and the answer is still to be heard
umask 022
fail() { echo "$program: error: $1" >&2; exit 1; }
. "$GPUSCHED_SPOOL/settings" || fail "this is no job script of gpusched"
[ "$rank" = 0 ] || fail "it is answered on the first node of the job only"
folder=$GPUSCHED_JOB_DIR id=$$-$(date +%s)
words="\"$program\""
for word in "$@"; do words=$words,\"$(printf '%s' "$word" | sed 's/[\\"]/\\&/g')\"; done
[ "${#words}" -le 3900 ] || fail "its arguments are too long"
tries=0
until mkdir "$folder/.asking.$GPUSCHED_ATTEMPT" 2>/dev/null; do # one asks at a time
    tries=$((tries + 1))
    [ "$tries" -le 600 ] || fail "another one waits for the controller, too"
    sleep 0.2
done
finish() { rm -f "$folder/ask.json" "$folder/ask.json.part" && rmdir "$folder/.asking.$GPUSCHED_ATTEMPT"; }
printf '{"id":"%s","attempt":%s,"words":[%s]}\n' "$id" "$GPUSCHED_ATTEMPT" "$words" >"$folder/ask.json.part" &&
    mv "$folder/ask.json.part" "$folder/ask.json" || { finish && fail "cannot write to $folder"; }
tries=0 answered=
until [ "$answered" = "$id" ]; do
    tries=$((tries + 1))
    [ "$tries" -le 450 ] || { finish && fail "the controller has not answered"; }
    sleep 0.2
    { read -r answered code <"$folder/answer"; } 2>/dev/null
done
to=1
[ "$code" = 0 ] || to=2
sed 1d "$folder/answer" >&$to
finish
exit "$code"
