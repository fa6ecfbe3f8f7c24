#!/usr/bin/env bash
# Makes the directory that `ray up` copies to every node: `secrets.sh`, or `secrets.sh rediss://user:password@host:6379`
# for a Redis or Valkey server that is there already. What exists stays as it is.
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
