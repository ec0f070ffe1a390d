#!/bin/sh
# Build the images: scripts/build_images.sh REGISTRY/sdp [ray|exporter ...]      (both, if none is named)
# Uses docker, or buildah if docker does not run. The environment may set BASE_IMAGE, TAG and, for ray only, EFA_INSTALLER
# (a version) together with EFA_SHA256 (the digest of its archive).
#   BASE_IMAGE=python:3.12-slim-bookworm EFA_INSTALLER=1.43.2 EFA_SHA256=... scripts/build_images.sh 111122223333.dkr.ecr.us-east-1.amazonaws.com/sdp ray
# Prints the names of the images for the charts: REGISTRY/sdp/ray:TAG.
set -eu
cd "$(dirname "$0")/.."

registry=${1:-}
case $registry in
  ''|-*) echo "usage: scripts/build_images.sh REGISTRY/sdp [ray|exporter ...]" >&2; exit 2 ;;
esac
shift
[ $# -gt 0 ] || set -- ray exporter
for image in "$@"; do
  [ -f "images/$image/Dockerfile" ] || { echo "build_images: no images/$image; expected ray or exporter" >&2; exit 2; }
done

if [ -n "${EFA_INSTALLER:-}" ] && [ -z "${EFA_SHA256:-}" ]; then
  echo "build_images: EFA_SHA256: expected the SHA-256 of AWS's archive, got nothing; docs/eks.md says how to find it" >&2
  exit 2
fi
if docker info >/dev/null 2>&1; then builder="docker build" # the daemon runs
elif command -v buildah >/dev/null 2>&1; then builder="buildah build --format docker"
else echo "build_images: neither a running docker nor buildah; install or start one" >&2; exit 2
fi
tag=${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}

for image in "$@"; do
  name=${registry%/}/$image:$tag
  $builder --file "images/$image/Dockerfile" --tag "$name" \
    ${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"} \
    ${EFA_INSTALLER:+--build-arg "EFA_INSTALLER=$EFA_INSTALLER"} \
    ${EFA_SHA256:+--build-arg "EFA_SHA256=$EFA_SHA256"} . >&2
  echo "$name"
done
