# After $1 seconds tells this pod's router or ranks that the pod goes, and waits for them to end, for $2 seconds
# at most. Ranks hand back what they have, and stay.
is_ours() {
    local name
    { read -r -d '' name <"$1/cmdline"; } 2>/dev/null || return 1
    [[ $name == ray::RankActor* || $name == ray::ServeReplica:everlift:router* ]]
}

sleep "$1"
told=()
for process in /proc/[0-9]*; do
    if is_ours "$process" && kill -USR1 "${process#/proc/}"; then told+=("$process"); fi
done
end=$((SECONDS + $2))
for process in "${told[@]}"; do
    while is_ours "$process" && ((SECONDS < end)); do sleep 0.1; done
done
