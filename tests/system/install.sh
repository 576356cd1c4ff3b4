#!/usr/bin/env bash
# Installs from Debian what the system tests need (a browser), if it is missing. One line says why when it cannot.
set -euo pipefail

stop() {
  echo "test-system: $*" >&2
  exit 2
}

for browser in chromium chromium-browser google-chrome; do
  if command -v "$browser" >/dev/null; then exit 0; fi
done
command -v apt-get >/dev/null || stop "no Chromium here and no apt-get to install it with: install Chromium by hand"
as_root=(env)
if [ "$(id -u)" -ne 0 ]; then
  sudo -n true 2>/dev/null || stop "no Chromium here, and installing needs root: run 'apt-get install chromium' as root"
  as_root=(sudo -n env)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "test-system: installing chromium from Debian (once)"
if ! { "${as_root[@]}" apt-get update &&
  "${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } \
  >"$log" 2>&1; then
  reason=$(grep '^E: ' "$log" | tail -n 1 || true)
  stop "apt-get could not install chromium: ${reason:-$(tail -n 1 "$log")}"
fi
command -v chromium >/dev/null || stop "the package chromium is installed, but there is no command 'chromium'"
