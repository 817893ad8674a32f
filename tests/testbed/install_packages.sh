#!/bin/sh
# Install, by apt and as root, the system packages that tests need and this machine lacks; otherwise say what that costs.
# It never fails: the tests themselves skip, or, with CI=true, fail.
set -u
PATH=$PATH:/usr/sbin:/sbin

missing=
need() { # PACKAGE PATH_OR_COMMAND
    command -v "$2" >/dev/null 2>&1 || missing="$missing $1"
}
need openssh-server sshd
need openssh-client ssh
need iproute2 ip
need tini tini-static
need podman podman
need crun crun
need runc runc
need conmon conmon
need busybox-static busybox
need iptables iptables
need uidmap newuidmap
need sudo sudo
need docker.io /usr/bin/docker
need slurmctld slurmctld
need slurmd slurmd
need slurmdbd slurmdbd
need slurm-client scontrol
need munge munged
need mariadb-server-core mariadbd
need mariadb-client-core mariadb
need gcc gcc
need procps ps
need zsh zsh
need chromium chromium
need prometheus prometheus
need python3-minimal /usr/bin/python3
for folder in /usr/lib/podman /usr/libexec/podman /usr/local/lib/podman /usr/bin; do
    [ -x $folder/netavark ] && netavark=1
done
for folder in /usr/lib/*/slurm-wlm /usr/lib/slurm-wlm; do
    [ -e $folder/select_cons_tres.so ] && slurm_plugins=1
    [ -e $folder/accounting_storage_mysql.so ] && slurm_mysql=1
done
[ -n "${slurm_plugins:-}" ] || missing="$missing slurm-wlm-basic-plugins"
[ -n "${slurm_mysql:-}" ] || missing="$missing slurm-wlm-mysql-plugin"
[ -n "${netavark:-}" ] || missing="$missing netavark"
command -v gcc >/dev/null 2>&1 && ! echo '#include <stdio.h>' | gcc -E - >/dev/null 2>&1 && missing="$missing libc6-dev"
command -v gcc >/dev/null 2>&1 || missing="$missing libc6-dev"

skip() {
    echo "note: tests that need a testbed of real sshd and containers (marker 'testbed') are skipped: $1" >&2
    [ -z "$missing" ] || echo "note:   apt-get install --no-install-recommends$missing" >&2
    exit 0
}
[ "$(id -u)" = 0 ] || skip "not root"
[ -n "$missing" ] || exit 0
command -v apt-get >/dev/null 2>&1 || skip "no apt-get to install$missing"
# Where systemd runs, installing openssh-server and docker.io would start them. That is the owner's decision.
if [ -d /run/systemd/system ] && [ "${CI:-}" != true ]; then
    skip "installing these would start services on this machine; do it yourself, or set CI=true"
fi
echo "installing system packages:$missing" >&2
install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >"$log" 2>&1; }
log=$(mktemp)
if ! install && ! { apt-get update -q >/dev/null 2>&1 && install; }; then
    tail -n 5 "$log" >&2
    rm -f "$log"
    skip "apt-get failed"
fi
rm -f "$log"
