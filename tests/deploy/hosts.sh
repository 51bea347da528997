#!/usr/bin/env bash
# Two hosts and a switch, each in namespaces of its own, until this script is killed: `ray stop` on a host sees that host's
# processes alone, and nothing outside is touched. Started by hosts.py inside a new network, mount and process namespace.
#   hosts.sh FOLDER: per host N FOLDER/N/ is the home of user `homing`; FOLDER/sshd_config, keys and passwd lie there
set -euo pipefail
folder=$1

host() { # the inside of host $1; its cable comes while it waits for a line
  mount --make-rprivate /
  mount -t tmpfs tmpfs /run && mkdir /run/sshd
  mount -t tmpfs tmpfs /dev/shm
  mount -t tmpfs tmpfs /tmp/ray
  # `homing` is root by another name: the first entry of user 0, so that ~ is its home for ssh, too.
  { echo "homing:*:0:0::$folder/$1:/bin/bash"; cat /etc/passwd; } > "$folder/passwd$1"
  mount --bind "$folder/passwd$1" /etc/passwd
  read -r _
  ip link set lo up
  ip link set eth0 up
  ip addr add "10.77.0.$1/24" dev eth0
  ip route add default via 10.77.0.254 # Ray finds its own address by the way that leads outside
  exec /usr/sbin/sshd -D -e -f "$folder/sshd_config"
}
export -f host
export folder

# The operator's own Ray files, beside the machine's: the state of a cluster is a file named after it.
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
ip link set lo up
ip link add switch type bridge
ip addr add 10.77.0.254/24 dev switch
ip link set switch up
for n in 1 2; do
  mkfifo "$folder/plug$n"
  unshare --net --mount --pid --uts --ipc --fork --mount-proc --kill-child bash -c "host $n" < "$folder/plug$n" &
  exec {plug}> "$folder/plug$n"
  until inside=$(pgrep --parent $!) && test "$(readlink "/proc/$inside/ns/net")" != "$(readlink /proc/self/ns/net)"; do
    sleep 0.05
  done
  ip link add "cable$n" type veth peer name eth0 netns "$inside"
  ip link set "cable$n" master switch up
  echo plugged >&"$plug"
done
echo ready
wait
