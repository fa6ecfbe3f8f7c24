for process in /proc/[0-9]*; do
    read -r -d '' name <"$process/cmdline" || continue
    if [[ $name == ray::RankActor* ]]; then kill -USR1 "${process#/proc/}"; fi
done
sleep 2
