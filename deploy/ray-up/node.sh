#!/usr/bin/env bash
# What `ray up` runs on a node:  node.sh setup | head | worker;  by hand:  node.sh stop-ledger
#
# SECRETS, a directory that `ray up` copies from beside the YAML, holds
#   auth_token        Ray's: without it nobody may speak to the cluster's Ray
#   ledger.password   of the ledger that the head node runs, or
#   ledger.url        of a Redis or Valkey server that is there already
set -euo pipefail

EVERLIFT=~/everlift
SECRETS=~/everlift-secrets
STATE=~/.local/state/everlift
# In a container all of it is on the path already.
VENV=${EVERLIFT_VENV:-$EVERLIFT/.venv}
LEDGER_PORT=6380
# Settings are EVERLIFT_ variables: this one is none.
unset EVERLIFT_VENV
export PATH="$VENV/bin:$PATH"

# For `ray down` and `ray exec`, which log in and call ray and everlift by their names.
remember() {
    {
        printf 'export PATH=%q:$PATH RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=%q\n' "$VENV/bin" "$SECRETS/auth_token"
        # A ledger that this node runs is found without.
        printf 'if [ -f %q ]; then export EVERLIFT_LEDGER__URL="$(cat %q)"; fi\n' "$SECRETS/ledger.url"{,}
    } >~/.everlift.sh
    grep -qs everlift.sh ~/.bashrc || echo '. ~/.everlift.sh' >>~/.bashrc
}

setup() {
    [ -x "$VENV/bin/everlift" ] && return
    python3 -m venv "$VENV"
    pip install -q -e "$EVERLIFT" -c "$EVERLIFT/constraints.txt"
}

environment() { # of everything that Ray starts; $1 is the head node's address
    ulimit -n 65536 || ulimit -n "$(ulimit -Hn)"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$SECRETS/auth_token"
    # Seconds that a node waits for the head.
    export RAY_NUM_REDIS_GET_RETRIES=120
    # What has torch's threads wait without taking the cores of others (cluster/threads.py).
    export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=500
    if [ -f "$SECRETS/ledger.url" ]; then
        EVERLIFT_LEDGER__URL=$(cat "$SECRETS/ledger.url")
    else
        EVERLIFT_LEDGER__URL="redis://everlift:$(cat "$SECRETS/ledger.password")@$1:$LEDGER_PORT"
    fi
    export EVERLIFT_LEDGER__URL
}

is_ledger() { # whether process $1 is: its number may be another one's by now. Who has ended has no command line
    local command
    command=$({ tr '\0' ' ' <"/proc/$1/cmdline"; } 2>/dev/null) || return 1
    [[ $command == *"everlift ledger --listen "*" --config $EVERLIFT/deploy/ray-up/settings.yaml "* ]]
}

stop_ledger() { # waits for its end
    local pid tries
    pid=$(cat "$STATE/ledger.pid" 2>/dev/null) && is_ledger "$pid" && kill "$pid" 2>/dev/null || return 0
    # It gives its server 10 s.
    for ((tries = 0; tries < 300; tries++)); do
        is_ledger "$pid" || return 0
        sleep 0.1
    done
    echo "the ledger (process $pid) does not end" >&2
    return 1
}

start_ledger() { # $1 is this node's address
    [ -f "$SECRETS/ledger.url" ] && return
    mkdir -p -m 700 "$STATE" "$STATE/ledger"
    install -m 600 "$SECRETS/ledger.password" "$STATE/ledger/password"
    stop_ledger
    # It outlives the ssh session, and `ray stop`.
    # shellcheck disable=SC2016  # $$ and $0 are the inner shell's
    setsid --fork bash -c 'echo $$ >"$0" && exec everlift ledger "$@"' "$STATE/ledger.pid" \
        --listen "$1:$LEDGER_PORT" --config "$EVERLIFT/deploy/ray-up/settings.yaml" \
        >>"$STATE/ledger.out" 2>&1 </dev/null
}

start_ray() { # with these arguments; again where a busy machine is too slow for the 30 s that Ray gives a raylet
    local tries
    for tries in 1 2 3; do
        ray stop
        ray start "$@" && return
        echo "Ray did not start (attempt $tries)" >&2
    done
    return 1
}

address() { # of this node, as others reach it: where they logged in, else what Ray finds
    local connection
    read -ra connection <<<"${SSH_CONNECTION-}"
    if [ -n "${connection[2]-}" ]; then
        echo "${connection[2]}"
    else
        python3 -c 'import ray.util; print(ray.util.get_node_ip_address())'
    fi
}

case "${1-}" in
setup) setup ;;
head)
    remember
    here=$(address)
    start_ledger "$here"
    environment "$here"
    start_ray --head --node-ip-address="$here" --port=6379 --dashboard-host=127.0.0.1 --resources='{"everlift_router": 1}' \
        --autoscaling-config=~/ray_bootstrap_config.yaml
    everlift build --config "$EVERLIFT/deploy/ray-up/settings.yaml" >"$STATE/serve.yaml"
    serve deploy "$STATE/serve.yaml"
    ;;
worker)
    remember
    environment "$RAY_HEAD_IP"
    start_ray --address="$RAY_HEAD_IP:6379" --node-ip-address="$(address)"
    ;;
stop-ledger) stop_ledger ;;
*)
    sed -n '2,7s/^# \?//p' "$0" >&2
    exit 2
    ;;
esac
