#!/usr/bin/env bash
# Installs what the system tests need and is missing: from Debian a browser, PostgreSQL, Caddy, iproute2 and Mooncake's libraries, from pip S3, Dask, Ray, Kubernetes and Mooncake.
# One line says why when it cannot.
set -euo pipefail

stop() {
  echo "test-system: $*" >&2
  exit 2
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

packages=()
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
[ -n "$chromium" ] || packages+=(chromium fonts-dejavu-core)
initdb=$(command -v initdb || compgen -G "/usr/lib/postgresql/*/bin/initdb" || true)
[ -n "$initdb" ] || packages+=(postgresql)
command -v caddy >/dev/null || packages+=(caddy)
PATH=$PATH:/usr/sbin command -v ip >/dev/null || packages+=(iproute2) # two machines of one
for needed in libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4; do # Mooncake, even for TCP
  compgen -G "/usr/lib/*/${needed%:*}" >/dev/null || packages+=("${needed#*:}")
done

if [ ${#packages[@]} -gt 0 ]; then
  wanted="${packages[*]}"
  command -v apt-get >/dev/null || stop "missing: $wanted, and no apt-get to install it with: install it by hand"
  as_root=(env)
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || stop "missing: $wanted, and installing needs root: run 'apt-get install $wanted' as root"
    as_root=(sudo -n env)
  fi
  echo "test-system: installing $wanted from Debian (once)"
  if ! { "${as_root[@]}" apt-get update &&
    "${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"; } \
    >"$log" 2>&1; then
    reason=$(grep '^E: ' "$log" | tail -n 1 || true)
    stop "apt-get could not install $wanted: ${reason:-$(tail -n 1 "$log")}"
  fi
fi

if ! .venv/bin/python -c "import boto3, hs_connectors, mooncake.store, moto.server, prefect_dask, prefect_kubernetes, prefect_ray, psycopg2, s3fs" 2>/dev/null; then
  echo "test-system: installing the packages for S3, PostgreSQL, Dask, Ray, Kubernetes and Mooncake (once)"
  .venv/bin/python -m pip install --quiet -c constraints.txt -e ".[system]" >"$log" 2>&1 ||
    stop "pip could not install them: $(tail -n 1 "$log")"
fi
