#!/usr/bin/env bash
# The three *.in files -> hash locks beside them. For people who change a pin; needs the network
# and `uv` on PATH (pip install uv). Pins that a lock already has are kept where they still fit;
# remove a lock first to take the newest of everything.
#
#     bash envs/lock.sh
#
#   envs/host.in        -> envs/host.lock        for Python 3.11 to 3.14
#   containers/cpu.in   -> containers/cpu.lock   for Python 3.11, the image's
#   containers/cuda.in  -> containers/cuda.lock  for Python 3.11, the image's
#   torch and the CUDA libraries that the package index's build needs -> envs/torch-cuda.lock
#
# host.lock and cpu.lock leave torch itself out: it is installed from envs/torch-cpu.lock (kept by
# hand) where pip finds that build, else from envs/torch-cuda.lock. cuda.lock is complete.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly HOST_PLATFORM=x86_64-manylinux_2_28  # Debian 11, Ubuntu 20.04, RHEL 8 and later
readonly IMAGE_PLATFORM=x86_64-manylinux_2_36 # Debian 12
readonly TORCH=2.13.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# uv takes replaced requirements only from a pyproject.toml.
mkdir "$work/cpu" "$work/plain"
cat >"$work/plain/pyproject.toml" <<TOML
[project]
name = "locks"
version = "0"
requires-python = ">=3.11"
TOML
cat "$work/plain/pyproject.toml" - >"$work/cpu/pyproject.toml" <<TOML
[[tool.uv.dependency-metadata]] # what the metadata of a CPU build says
name = "torch"
version = "$TORCH"
requires-dist = [
  "filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3",
  "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5",
]

[[tool.uv.dependency-metadata]] # containers/cpu.in lists what a CPU server imports
name = "sglang"
requires-dist = []
TOML

# compile METADATA PLATFORM INPUT LOCK OPTION...: one uv run; the lock's header names this script.
compile() {
    local metadata=$1 platform=$2 input=$3 lock=$4
    shift 4
    uv pip compile --quiet --project "$work/$metadata" --generate-hashes --no-annotate \
        --python-version 3.11 --python-platform "$platform" \
        --custom-compile-command 'bash envs/lock.sh' "$@" "$input" --output-file "$lock"
    echo "$lock: $(grep -c '^[a-z0-9]' "$lock") packages"
}

pins() { sed -nE 's/^([a-z0-9._-]+==[^ ;]+).*/\1/p' "$1"; }
names() { pins "$1" | sed 's/==.*//'; }

grep -q "^torch==$TORCH+cpu " envs/torch-cpu.lock || {
    echo "envs/torch-cpu.lock: expected torch==$TORCH+cpu; put the hash of that build there (pip hash FILE)" >&2
    exit 1
}
compile cpu $HOST_PLATFORM envs/host.in envs/host.lock --no-emit-package torch
compile cpu $IMAGE_PLATFORM containers/cpu.in containers/cpu.lock --only-binary :all: --no-emit-package torch
echo cuda-tile >"$work/excludes" # see containers/cuda.in
compile plain $IMAGE_PLATFORM containers/cuda.in containers/cuda.lock --only-binary :all: --excludes "$work/excludes"

# Everything that torch asks for and the host lock lacks, at versions that fit the host lock.
leave_out=()
for name in $(names envs/host.lock); do leave_out+=(--no-emit-package "$name"); done
pins envs/host.lock >"$work/constraints"
echo "torch==$TORCH" >"$work/torch.in"
compile plain $HOST_PLATFORM "$work/torch.in" envs/torch-cuda.lock \
    --constraints "$work/constraints" "${leave_out[@]}"

for version in 3.12 3.13 3.14; do
    uv pip compile --quiet --project "$work/cpu" --no-annotate --no-header --no-emit-package torch \
        --constraints "$work/constraints" --python-version "$version" --python-platform $HOST_PLATFORM \
        envs/host.in >"$work/$version"
    if missing=$(grep -vxFf <(names envs/host.lock) <(names "$work/$version")); then
        echo "envs/host.lock lacks, for Python $version:" $missing >&2
        exit 1
    fi
    echo "envs/host.lock: fits Python $version"
done
