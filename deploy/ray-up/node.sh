#!/usr/bin/env bash
# Commands that `ray up` runs on a node:  node.sh setup | head | worker;  to be run by hand:  node.sh stop-ledger
#
# SECRETS is a directory that `ray up` copies from deploy/ray-up/secrets. It contains
#   auth_token        Ray's token, which every connection to the cluster's Ray needs
#   ledger.password   password of the ledger that the head node runs, or
#   ledger.url        URL of an existing Redis or Valkey server
set -euo pipefail

EVERLIFT=~/everlift
SECRETS=~/everlift-secrets
STATE=~/.local/state/everlift
# In a container Everlift is already on the PATH.
VENV=${EVERLIFT_VENV:-$EVERLIFT/.venv}
LEDGER_PORT=6380
# EVERLIFT_ variables are read as settings, but this one is not a setting.
unset EVERLIFT_VENV
export PATH="$VENV/bin:$PATH"

# Write the environment for later logins: `ray down` and `ray exec` log in and call ray and everlift by name.
write_login_profile() {
    {
        printf 'export PATH=%q:$PATH RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=%q\n' "$VENV/bin" "$SECRETS/auth_token"
        # The URL of a ledger that this node runs is found without this variable.
        printf 'if [ -f %q ]; then export EVERLIFT_LEDGER__URL="$(cat %q)"; fi\n' "$SECRETS/ledger.url"{,}
    } >~/.everlift.sh
    grep -qs everlift.sh ~/.bashrc || echo '. ~/.everlift.sh' >>~/.bashrc
}

setup() {
    [ -x "$VENV/bin/everlift" ] && return
    python3 -m venv "$VENV"
    pip install -q -e "$EVERLIFT" -c "$EVERLIFT/constraints.txt"
}

environment() { # set the environment of all processes that Ray starts; $1 is the head node's address
    ulimit -n 65536 || ulimit -n "$(ulimit -Hn)"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$SECRETS/auth_token"
    # Number of seconds for which a node waits for the head.
    export RAY_NUM_REDIS_GET_RETRIES=120
    # Waiting threads of torch sleep, so that they do not take cores from other processes (cluster/threads.py).
    export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=500
    if [ -f "$SECRETS/ledger.url" ]; then
        EVERLIFT_LEDGER__URL=$(cat "$SECRETS/ledger.url")
    else
        EVERLIFT_LEDGER__URL="redis://everlift:$(cat "$SECRETS/ledger.password")@$1:$LEDGER_PORT"
    fi
    export EVERLIFT_LEDGER__URL
}

# Whether process $1 is the ledger. Its id may have been reused by another process; an ended one has no command line.
is_ledger() {
    local command
    command=$({ tr '\0' ' ' <"/proc/$1/cmdline"; } 2>/dev/null) || return 1
    [[ $command == *"everlift ledger --listen "*" --config $EVERLIFT/deploy/ray-up/settings.yaml "* ]]
}

stop_ledger() { # and wait until it has ended
    local pid tries
    pid=$(cat "$STATE/ledger.pid" 2>/dev/null) && is_ledger "$pid" && kill "$pid" 2>/dev/null || return 0
    # The ledger waits up to 10 s for its server to stop.
    for ((tries = 0; tries < 300; tries++)); do
        is_ledger "$pid" || return 0
        sleep 0.1
    done
    echo "the ledger (process $pid) did not stop within 30 s" >&2
    return 1
}

start_ledger() { # $1 is this node's address
    [ -f "$SECRETS/ledger.url" ] && return
    mkdir -p -m 700 "$STATE/ledger"
    install -m 600 "$SECRETS/ledger.password" "$STATE/ledger/password"
    stop_ledger
    # setsid lets the ledger outlive the ssh session and `ray stop`.
    # shellcheck disable=SC2016  # $$ and $0 are the inner shell's
    setsid --fork bash -c 'echo $$ >"$0" && exec everlift ledger "$@"' "$STATE/ledger.pid" \
        --listen "$1:$LEDGER_PORT" --config "$EVERLIFT/deploy/ray-up/settings.yaml" \
        >>"$STATE/ledger.out" 2>&1 </dev/null
}

# Run `ray start` with the given arguments. It is retried, because a busy machine may need more than the 30 s that Ray
# allows for the start of a raylet.
start_ray() {
    local tries
    for tries in 1 2 3; do
        ray stop
        ray start "$@" && return
        echo "Ray did not start (attempt $tries)" >&2
    done
    return 1
}

# Print the address of this node for other nodes: the one to which this ssh session connected, else the one Ray finds.
address() {
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
    write_login_profile
    mkdir -p -m 700 "$STATE"
    here=$(address)
    start_ledger "$here"
    environment "$here"
    start_ray --head --node-ip-address="$here" --port=6379 --dashboard-host=127.0.0.1 --resources='{"everlift_router": 1}' \
        --autoscaling-config=~/ray_bootstrap_config.yaml
    everlift build --config "$EVERLIFT/deploy/ray-up/settings.yaml" >"$STATE/serve.yaml"
    serve deploy "$STATE/serve.yaml"
    ;;
worker)
    write_login_profile
    environment "$RAY_HEAD_IP"
    start_ray --address="$RAY_HEAD_IP:6379" --node-ip-address="$(address)"
    ;;
stop-ledger) stop_ledger ;;
*)
    sed -n '2,7s/^# \?//p' "$0" >&2
    exit 2
    ;;
esac
