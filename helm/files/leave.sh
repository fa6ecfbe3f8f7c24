# Notifies this pod's router or ranks after $1 seconds that the pod will end (SIGUSR1), then waits at most $2 seconds
# for them to end. Ranks return their requests to the routers and keep running.
is_ours() {
    local name
    { read -r -d '' name <"$1/cmdline"; } 2>/dev/null || return 1
    [[ $name == ray::RankActor* || $name == ray::ServeReplica:everlift:router* ]]
}

sleep "$1"
notified=()
for process in /proc/[0-9]*; do
    if is_ours "$process" && kill -USR1 "${process#/proc/}"; then notified+=("$process"); fi
done
end=$((SECONDS + $2))
for process in "${notified[@]}"; do
    while is_ours "$process" && ((SECONDS < end)); do sleep 0.1; done
done
