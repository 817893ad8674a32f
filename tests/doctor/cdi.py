"""Break a node's CDI, and mend it."""

MISSING = "/usr/lib/libcuda.so.535.99"


BREAK_CDI = f"""cp /etc/cdi/nvidia.json /etc/cdi-kept && python3 - <<'.'
import json
spec = json.load(open("/etc/cdi-kept"))
mount = dict(hostPath="{MISSING}", containerPath="{MISSING}", options=["ro", "bind"])
spec.setdefault("containerEdits", dict()).setdefault("mounts", []).append(mount)
json.dump(spec, open("/etc/cdi/nvidia.json", "w"))
."""


MEND_CDI = "cp /etc/cdi-kept /etc/cdi/nvidia.json"
