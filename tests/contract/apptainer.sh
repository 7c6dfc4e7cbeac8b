#!/bin/bash
# Apptainer and the images the tests use. Run it as often as you like: it does only what is not done yet.
# Needs the Docker engine and images of engine.sh, from which the images are made: directories below $IMAGES, py and sh.
# Where the system's package sources have no Apptainer, that of Debian's unstable suite is taken, with that suite's own
# C library beside it in a folder of its own; the system's libraries and package lists stay as they are.
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
readonly PREFIX=/opt/batch-runner-apptainer IMAGES=/var/tmp/batch-runner-test-images

packages() {
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

from_unstable() {
  local sources=/etc/apt/sources.list.d/debian.sources triplet options file
  local new=$PREFIX.new
  triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
  packages patchelf squashfs-tools uidmap
  rm -rf "$new"
  mkdir -p "$new"/{apt/lists/partial,apt/archives/partial,deb,lib,root}
  echo "deb [signed-by=$(awk '/^Signed-By/ { print $2; exit }' $sources)]" \
    "$(awk '/^URIs/ { print $2; exit }' $sources) sid main" >"$new/apt/sources.list"
  options=(-o "Dir::Etc::sourcelist=$new/apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$new/apt/lists"
    -o "Dir::Cache=$new/apt" -o APT::Sandbox::User=root -o Acquire::Languages=none)
  apt-get "${options[@]}" update -qq
  (cd "$new/deb" && apt-get "${options[@]}" download -qq apptainer libc6/sid libseccomp2/sid libsqlite3-0/sid >/dev/null)
  dpkg -x "$new"/deb/apptainer_*.deb "$new/root"
  for file in "$new"/deb/lib*.deb; do dpkg -x "$file" "$new/libraries"; done
  cp -L "$new/libraries/usr/lib/$triplet"/*.so* "$new/lib/"
  rm -rf "$new"/{libraries,apt,deb}
  cd "$new/root/usr"
  patchelf --force-rpath --set-rpath "$PREFIX/lib" "$new"/lib/{libsqlite3.so.0,libseccomp.so.2}
  for file in bin/apptainer "lib/$triplet/apptainer/bin/starter"; do
    patchelf --set-interpreter "$PREFIX/lib/$(cd "$new/lib" && echo ld-linux*)" --force-rpath --set-rpath "$PREFIX/lib" "$file"
  done
  for file in . lib; do # it looks for these beside its programs
    ln -sfn "$(realpath --relative-to=$file ../etc)" $file/etc
    ln -sfn "$(realpath --relative-to=$file ../var)" $file/var
  done
  # Root may lack capabilities here, and it would ask for all there are.
  sed -i 's/^root default capabilities = full/root default capabilities = no/; s/^systemd cgroups = yes/systemd cgroups = no/' \
    ../etc/apptainer/apptainer.conf
  chmod -R go+rX "$new"
  rm -rf "$PREFIX"
  mv "$new" "$PREFIX"
  printf '#!/bin/sh\nexec %s "$@"\n' "$PREFIX/root/usr/bin/apptainer" >/usr/local/bin/apptainer
  chmod 755 /usr/local/bin/apptainer
}

install() {
  command -v apptainer >/dev/null && return
  [ -n "$(apt-cache policy apptainer 2>/dev/null | grep 'Candidate: [0-9]')" ] && packages apptainer && return
  from_unstable
}

make_image() { # again when the Docker image is another
  local id
  id=$(docker image inspect -f '{{.Id}}' "batch-runner-test:$1")
  [ "$(cat "$IMAGES/$1.id" 2>/dev/null)" = "$id" ] && return
  rm -rf "$IMAGES/$1"
  apptainer -s build --sandbox "$IMAGES/$1" "docker-daemon:batch-runner-test:$1"
  echo "$id" >"$IMAGES/$1.id"
}

exec 9>"${TMPDIR:-/tmp}/batch-runner-apptainer.lock"
flock 9
install
mkdir -p "$IMAGES"
for kind in py sh; do make_image $kind; done
id batch-runner-test >/dev/null 2>&1 || useradd -m batch-runner-test # an ordinary user, who has further users of his own
