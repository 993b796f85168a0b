#!/usr/bin/env bash
# End the Slurm that `start.sh DIR` started: by the process numbers that it left there.
set -u
dir=$(realpath "$1")
export SLURM_CONF=$dir/slurm.conf
scancel --user "$(id -un)" 2>/dev/null
for _ in $(seq 50); do [ -z "$(squeue --noheader 2>/dev/null)" ] && break; sleep 0.2; done
for daemon in slurmd slurmctld munged; do
  [ -f "$dir/$daemon.pid" ] || continue
  pid=$(cat "$dir/$daemon.pid")
  kill "$pid" 2>/dev/null
  for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
done
exit 0
