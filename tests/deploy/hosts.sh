#!/usr/bin/env bash
# Runs two hosts and a switch, each in its own namespaces, until killed. `ray stop` on a host sees only that host's
# processes, and nothing outside is touched. Started by hosts.py inside a new network, mount and process namespace.
#   hosts.sh FOLDER: FOLDER/N/ is the home of user `homing` on host N; FOLDER also has sshd_config, keys and passwd
set -euo pipefail
folder=$1

host() { # runs inside host $1; its cable is attached while it waits for a line
  mount --make-rprivate /
  mount -t tmpfs tmpfs /run && mkdir /run/sshd
  mount -t tmpfs tmpfs /dev/shm
  mount -t tmpfs tmpfs /tmp/ray
  # `homing` is another name of root: the first passwd entry of user 0, so that ssh, too, uses its home for ~.
  { echo "homing:*:0:0::$folder/$1:/bin/bash"; cat /etc/passwd; } > "$folder/passwd$1"
  mount --bind "$folder/passwd$1" /etc/passwd
  read -r _
  ip link set lo up
  ip link set eth0 up
  ip addr add "10.77.0.$1/24" dev eth0
  ip route add default via 10.77.0.254 # Ray takes its own address from the route that leads outside
  exec /usr/sbin/sshd -D -e -f "$folder/sshd_config"
}
export -f host
export folder

# The operator needs its own Ray files, because a cluster's state is a file named after it.
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
