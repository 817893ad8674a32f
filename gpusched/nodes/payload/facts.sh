# The probe for a node without python3: facts in sections that gpusched parses (gpusched/nodes/parse_reading.py).
# BOUNDED of runtimes/shell.py is before it, attempts.sh follows it. Variables: those of attempts.sh.
LC_ALL=C; export LC_ALL
section() { printf '\n@@%s\n' "$1"; }
smi() { bounded 10 nvidia-smi "$1" --format=csv,noheader,nounits; }
printf '\n@gpusched-sections@\n'
section clock; date +%s
section python3; python3 -I -S -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null && echo yes
section boot_id; cat /proc/sys/kernel/random/boot_id
section hostname; uname -n
section cores; nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
section meminfo; grep -E '^Mem(Total|Available):' /proc/meminfo
section loadavg; cat /proc/loadavg
section df; df -Pk "$HOME" 2>/dev/null
if command -v nvidia-smi >/dev/null 2>&1; then
  section smi_gpus
  fields=index,uuid,name,memory.total,memory.used,utilization.gpu,power.draw
  more=enforced.power.limit,temperature.gpu,ecc.errors.uncorrected.volatile.total,mig.mode.current,driver_version
  answer=$(smi "--query-gpu=$fields,$more" 2>&1)
  case $answer in *"not a valid field"*) answer=$(smi "--query-gpu=$fields,power.limit,temperature.gpu" 2>&1);; esac
  printf '%s\n' "$answer"
  section smi_apps
  apps=$(smi --query-compute-apps=gpu_uuid,pid,used_memory 2>/dev/null); printf '%s\n' "$apps"
  section processes
  printf '%s\n' "$apps" | while IFS=, read -r _ pid _; do
    pid=${pid# }
    case $pid in ''|*[!0-9]*) continue;; esac
    name=$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n 's/^GPUSCHED_CONTAINER=//p' | head -n 1)
    user=$(ls -ld "/proc/$pid" 2>/dev/null | { read -r _ _ owner _; printf %s "$owner"; })
    args=$(tr '\0\n\t' '   ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-120)
    printf '%s\t%s\t%s\t%s\n' "$pid" "$user" "$name" "$args"
  done
fi
section attempts
