#!/usr/bin/env bash
# Create the directory of secrets that `ray up` copies to every node: `secrets.sh`. To use an existing Redis or Valkey
# server as the ledger: `secrets.sh rediss://user:password@host:6379`. An existing token or password is kept.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
[ -f secrets/auth_token ] || openssl rand -hex 32 >secrets/auth_token
if [ $# -gt 0 ]; then
    printf %s "$1" >secrets/ledger.url
elif [ ! -f secrets/ledger.password ]; then
    printf %s "$(openssl rand -hex 32)" >secrets/ledger.password
fi
