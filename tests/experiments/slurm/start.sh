#!/usr/bin/env bash
# A Slurm of one node on loopback: `start.sh DIR CPUS`. Everything it writes is in DIR; `stop.sh DIR` ends it.
# Needs munged, slurmctld and slurmd (Debian: munge slurmctld slurmd slurm-client), and root, as slurmd does.
set -euo pipefail
dir=$(realpath "$1") cpus=${2:-2}
host=$(hostname -s) user=$(id -un)

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

wait_for() {  # what, command...
  local what=$1; shift
  for _ in $(seq 150); do "$@" >/dev/null 2>&1 && return; sleep 0.2; done
  echo "start.sh: $what did not start within 30 s; the logs are in $dir" >&2; exit 1
}

mkdir -p "$dir"/{munge,state,spool}
chmod 0755 "$dir" "$dir/munge"
(umask 077; head -c 1024 /dev/urandom > "$dir/munge/key")

cat > "$dir/slurm.conf" <<END
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge/socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$(awk '/MemTotal/ { print int($2 / 1024 * 0.9) }' /proc/meminfo) State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END

munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munged.pid" \
  --log-file="$dir/munged.log" --seed-file="$dir/munge/seed"
export SLURM_CONF=$dir/slurm.conf
slurmctld -f "$SLURM_CONF" -c
slurmd -f "$SLURM_CONF"
wait_for slurmctld scontrol ping
wait_for slurmd sh -c "sinfo --noheader --format=%T | grep -q idle"
echo "$SLURM_CONF"
