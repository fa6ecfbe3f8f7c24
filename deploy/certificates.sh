#!/usr/bin/env bash
# Create certificates, and two private certificate authorities that sign them:
#
#   certificates.sh DIRECTORY NAMES [CLIENT...]
#
# NAMES are the names by which clients reach the routers, as for openssl: DNS:llm.example,IP:10.0.0.10. DIRECTORY gets
#   router/          certificate that routers present to clients
#   internal/        certificate that routers and workers present to each other
#   client-CLIENT/   certificate that a client presents to routers that require one
#   authorities/     keys and certificates of the authorities; do not copy them to other machines
# The first three have tls.crt, tls.key and ca.crt, as in a Kubernetes Secret. A rerun renews all but the authorities.
set -euo pipefail
umask 077
[ $# -ge 2 ] || { sed -n '2,11s/^# \?//p' "$0" >&2 && exit 2; }
names=$2
clients=("${@:3}")
mkdir -p "$1/authorities"
cd "$1"
new_key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)

authority() { # NAME
    [ -f "authorities/$1.crt" ] && return
    # Python 3.13 and newer reject an authority without key usage.
    openssl req -x509 "${new_key[@]}" -days 3650 -subj "/CN=everlift $1" \
        -addext keyUsage=critical,keyCertSign,cRLSign -keyout "authorities/$1.key" -out "authorities/$1.crt"
}

certificate() { # AUTHORITY DIRECTORY NAMES
    local new
    new=$(mktemp -d)
    openssl req "${new_key[@]}" -subj "/CN=$2" -keyout "$new/tls.key" -out "$new/request"
    openssl x509 -req -in "$new/request" -CA "authorities/$1.crt" -CAkey "authorities/$1.key" -CAcreateserial -days 90 \
        -extfile <(echo "subjectAltName=$3") -out "$new/tls.crt"
    mkdir -p "$2"
    cp "authorities/$1.crt" "$2/ca.crt"
    mv "$new/tls.key" "$new/tls.crt" "$2"
    rm -r "$new"
}

authority clients
authority internal
certificate clients router "$names"
certificate internal internal DNS:everlift
for client in "${clients[@]}"; do certificate clients "client-$client" "DNS:$client"; done
