#!/bin/bash
# Podman's service and the images the tests use. Run it as often as you like: it does only what is not done yet.
# Needs the Docker engine and images of engine.sh, from which the images are taken.
# The service answers where the machine's own would, for as long as the machine runs. Containers get limits of their own
# (root may lack the right to raise them here), and registries on loopback may speak plain HTTP, as they may to docker.
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
readonly SOCKET=/run/podman/podman.sock SETTINGS=/var/tmp/batch-runner-test-podman
readonly ENGINE_PACKAGES=(podman catatonit)

answers() { timeout 20 podman --remote --url "unix://$SOCKET" info >/dev/null 2>&1; }

install() {
  command -v podman >/dev/null && [ -x /usr/libexec/podman/catatonit ] && return
  apt-get install -y -qq --no-install-recommends "${ENGINE_PACKAGES[@]}" >/dev/null 2>&1 && return
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${ENGINE_PACKAGES[@]}" >/dev/null
}

write_settings() {
  mkdir -p "$SETTINGS"
  printf '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n' >"$SETTINGS/containers.conf"
  printf '[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n' >"$SETTINGS/registries.conf"
}

start_service() {
  answers && return
  mkdir -p "${SOCKET%/*}"
  rm -f "$SOCKET" # of one that was killed
  (cd "$SETTINGS" && # where it leaves a file `oom` when a container ran out of memory
    exec setsid podman system service --time 0 "unix://$SOCKET" >"$SETTINGS/service.log" 2>&1 </dev/null 9>&-) &
  for _ in $(seq 300); do
    answers && return
    sleep 0.1
  done
  echo "podman's service does not answer: see $SETTINGS/service.log" >&2
  return 1
}

take_image() { # again when the Docker image is another
  local id
  id=$(docker image inspect -f '{{.Id}}' "batch-runner-test:$1")
  if [ "$(podman image inspect -f '{{.Id}}' "localhost/batch-runner-test:$1" 2>/dev/null)" != "${id#sha256:}" ]; then
    docker save "batch-runner-test:$1" | podman load -q >/dev/null
  fi
}

exec 9>"${TMPDIR:-/tmp}/batch-runner-podman.lock"
flock 9
install
write_settings
export CONTAINERS_CONF=$SETTINGS/containers.conf CONTAINERS_REGISTRIES_CONF=$SETTINGS/registries.conf
start_service
for kind in py sh box user; do take_image $kind; done
podman image exists docker.io/library/python:3.11-slim ||
  podman tag localhost/batch-runner-test:py docker.io/library/python:3.11-slim
