#!/bin/sh
# Turns a fresh set of namespaces (network, UTS, mount, PID, IPC) into a node, then becomes its PID 1.
# Arguments: NAME DISK LIBRARY LIBRARY_FOLDER SSHD. What lies in DISK survives a reboot; the rest is tmpfs.
# /tmp stays the machine's own: it plays the shared file system of a cluster.
set -eu
name=$1 disk=$2 library=$3 library_folder=$4 sshd=$5

hostname "$name"
# The namespaces of other nodes are mounted here and could not be deleted while we held them.
umount -R -l /run/netns 2>/dev/null || :
mount -t tmpfs -o mode=755 none /run
mount -t tmpfs none /dev/shm
run=/run/gpusched-testbed
mkdir -p /run/sshd /run/lock $run/usr $run/nvml $run/dev $run/over/usr $run/over/usr.work $run/over/etc $run/over/etc.work
mount --bind "$disk/nvml" $run/nvml

# The pristine /usr stays at hand, to bring back what was hidden.
mount --bind /usr $run/usr
mount -t overlay -o "lowerdir=/usr,upperdir=$run/over/usr,workdir=$run/over/usr.work" none /usr
mount -t overlay -o "lowerdir=/etc,upperdir=$run/over/etc,workdir=$run/over/etc.work" none /etc
cp -R "$disk/etc/." /etc/
mkdir -p /usr/local/sbin /var/lib/containers
mount --bind "$disk/bin" /usr/local/sbin
mount --bind "$disk/home" /root
mount --bind "$disk/vartmp" /var/tmp
mount --bind "$disk/containers" /var/lib/containers
mount --bind "$disk/boot_id" /proc/sys/kernel/random/boot_id

rm -f "$library_folder/libnvidia-ml.so.1"
cp "$library" "$library_folder/libnvidia-ml.so.1"
i=0
while [ $i -lt 16 ]; do
    mknod -m 666 $run/dev/nvidia$i c 195 $i
    i=$((i + 1))
done
while read -r command; do
    for folder in sbin bin local/bin games; do
        rm -f "/usr/$folder/$command"
    done
done < "$disk/hidden"

cd /
"$sshd" -f "$disk/ssh/sshd_config" -E "$disk/ssh/log"
exec tini -- sleep infinity
