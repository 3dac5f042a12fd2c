#!/bin/bash
# One process per node, in the container if there is one:
#   ray_node.sh ray       this node's part of the job's own Ray cluster, until the job says "down"
#   ray_node.sh driver    the training itself, on the first node
# The batch script and the nodes talk through small files in $GRPO_JOB. Each is there from the start
# and is opened for every look, which is what makes a shared file system show its newest contents.
set -uo pipefail
: "${GRPO_JOB:?set by train.sbatch}" "${GRPO_ATTEMPT:?set by train.sbatch}" "${SLURM_JOB_ID:?only inside a SLURM job}"
node=${SLURMD_NODENAME:-$HOSTNAME}
say() { echo "[$(date +%T) $node] $*"; }
{%- if setup %}

# From --setup
{{ setup }}
{%- endif %}

python={{ python | sh }}
job=$SLURM_JOB_ID
number=${SLURM_PROCID:-0}
gpus=${SLURM_GPUS_ON_NODE:-0}
cpus=${SLURM_CPUS_ON_NODE:-1}
peers=${GRPO_NODE_LIST:?set by train.sbatch}
# The switches and racks above this node, where the cluster has told SLURM of them.
domain=${SLURM_TOPOLOGY_ADDR:-}
domain=${domain%.*}
role=${GRPO_ROLE:-any}
if [ "$role" = by_group ]; then
  # The component's own numbering starts again in each part of a heterogeneous job.
  role=policy
  [ "$number" -ge "${GRPO_POLICY_NODES:?set by train.sbatch}" ] && role=engine
fi

# Libraries that find these would take themselves for a part of an MPI job, or for the only node.
for name in $(compgen -e | grep -E '^(PMI|PMIX|SLURM|RAY_ADDRESS)'); do unset "$name"; done
# The log is a file, whatever terminal the job was submitted from.
unset FORCE_COLOR TTY_COMPATIBLE TTY_INTERACTIVE
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$GRPO_JOB/ray_token" RAY_USAGE_STATS_ENABLED=0
# A drain of 30 s would outlast the time that SLURM gives a job to end.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
ulimit -Sn "$(ulimit -Hn)" 2>/dev/null || say "open files stay limited to $(ulimit -Sn)"

control() { local word=; read -r word <"$GRPO_JOB/control"; echo "$word"; }
published_head() { local head=; read -r head <"$GRPO_JOB/head"; echo "$head"; }

if [ -z "${GRPO_NODE_ADDRESS:-}" ]; then
  answer=$("$python" -m grpo_launch.address "$peers") || exit 4
  read -r GRPO_NODE_ADDRESS interface <<<"$answer"
  export GRPO_NODE_ADDRESS
  if [ -n "$interface" ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
  fi
fi

run_driver() {
  local head child word asked=0 status
  head=$(published_head)
  export RAY_ADDRESS=$head
  "$python" -m megatron_grpo.cli train {{ config | sh }} "run_dir=$GRPO_RUN_DIR" "cluster.address=$head" \
    cluster.nodes={{ nodes + engine_nodes }} cluster.placement_deadline_s={{ join_deadline_s }}{% if seeds %} "seed=$GRPO_SEED"{% endif %} &
  child=$!
  trap 'kill -TERM $child 2>/dev/null' TERM
  while kill -0 $child 2>/dev/null; do
    word=$(control)
    if [ "$word" = stop ] && [ $asked = 0 ]; then
      asked=1
      say "asking the run to save and stop"
      kill -USR1 $child
    elif [ "$word" = down ] && [ $asked != 2 ]; then
      asked=2
      kill -TERM $child
    elif [ "$word" = abort ]; then
      kill -KILL $child
    fi
    sleep 1
  done
  wait $child
  status=$?
  # Asked before it could answer (128 + SIGUSR1): nothing was begun, so it can begin again.
  [ $status = 138 ] && [ $asked = 1 ] && status=75
  exit $status
}

run_ray() {
  local store shm head='' child='' status=1 ended=0 waited=0 first=0 log try
  local folder=${GRPO_TMP:-/tmp}/grpo-$job-$number
  [ "$number" = 0 ] && first=1
  mkdir -p "$folder" && chmod 700 "$folder" || exit 4
  log=$GRPO_JOB/ray-$node-$GRPO_ATTEMPT.log
  shm=$(df --output=avail -B1 /dev/shm 2>/dev/null | tail -n 1)
  store=$((${shm:-0} / 2))
  [ $store -gt $((4 << 30)) ] && store=$((4 << 30))
  [ $store -lt $((80 << 20)) ] && store=$((80 << 20))
  # Port 0: taken by the process that listens, so that two jobs on a node cannot choose the same.
  set -- --node-ip-address="$GRPO_NODE_ADDRESS" --num-gpus="$gpus" --num-cpus="$cpus" \
    --object-store-memory=$store --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0 \
    --disable-usage-stats --block
  set -- "$@" --resources="{\"grpo:role:$role\": 1${domain:+, \"grpo:domain:$domain\": 1}}"
  if [ $first = 1 ]; then
    # Ray's own client server takes no 0; nobody uses it, and one that cannot listen does no harm.
    set -- --head --port=0 --include-dashboard=false --ray-client-server-port=$((20000 + job % 12000)) "$@"
  else
    while head=$(published_head) && [ -z "$head" ]; do
      [ "$(control)" = down ] && exit 0
      [ $waited -ge {{ start_deadline_s }} ] && { say "the head did not start within {{ start_deadline_s }} s"; exit 4; }
      waited=$((waited + 1))
      sleep 1
    done
    set -- --address="$head" "$@"
  fi
  trap 'ended=1; kill -TERM $child 2>/dev/null' TERM
  # Ray gives itself 30 s to start and its helpers 15 s, which a busy machine, a slow file system or a
  # head with many nodes can exceed.
  for try in 1 2 3 4 5; do
    "$python" -m ray.scripts.scripts start --temp-dir="$folder" "$@" >"$log" 2>&1 &
    child=$!
    while kill -0 $child 2>/dev/null; do
      if [ $first = 1 ] && [ -z "$head" ]; then
        head=$(sed -n "s/.*ray start --address='\([^']*\)'.*/\1/p" "$log" | head -n 1)
        [ -n "$head" ] && { echo "$head" >"$GRPO_JOB/head"; say "Ray's head listens at $head"; }
      fi
      # A sign of life that the batch script compares with the others', whatever the clocks say.
      echo "$GRPO_NODE_ADDRESS" >"$GRPO_JOB/alive/$node"
      [ "$(control)" = down ] && kill -TERM $child 2>/dev/null
      sleep 1 &
      wait $! # unlike sleep itself, it lets a signal through
    done
    wait $child
    status=$?
    [ "$(control)" = down ] && ended=1
    if [ $ended = 1 ] || grep -q "Ray runtime started" "$log"; then break; fi
    say "Ray did not start (try $try of 5); the end of $log:"
    tail -n 3 "$log"
  done
  if [ $ended = 1 ]; then
    status=0 # Ray says 1 when it is told to stop
  else
    say "Ray ended by itself ($status); the end of $log:"
    tail -n 5 "$log"
    [ $status = 0 ] && status=5
    echo "$status" >"$GRPO_JOB/crashed-$GRPO_ATTEMPT-$node"
  fi
  rm -f "$GRPO_JOB/alive/$node"
  mkdir -p "$GRPO_JOB/ray-logs" && cp -rL "$folder/session_latest/logs" "$GRPO_JOB/ray-logs/$node-$GRPO_ATTEMPT" 2>/dev/null
  rm -rf "$folder"
  exit $status
}

case ${1:?ray or driver} in
  ray) run_ray ;;
  driver) run_driver ;;
  *) say "unknown part $1"; exit 2 ;;
esac
