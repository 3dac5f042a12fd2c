#!/bin/bash
# Install SLURM and munge from Debian or Ubuntu without starting any service. Needs root.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
command -v slurmctld slurmd munged sbatch ip >/dev/null && exit 0
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2
