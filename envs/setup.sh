#!/usr/bin/env bash
# A checkout on a fresh machine -> `.venv` with exactly the packages of envs/host.lock, and a
# working Apptainer. Ends with `.venv/ready`, which names what was set up; run again, it compares
# that with the locks and the machine and is done in a second.
#
#     make setup        (or: bash envs/setup.sh)
#
# Everything stays inside the checkout, except that on Debian and Ubuntu a missing Python or
# Apptainer is installed by apt; such steps are announced before they run.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 PYTHONNOUSERSITE=1
unset PYTHONPATH PYTHONHOME

readonly VENV=.venv INSTALLED=.venv/installed READY=.venv/ready LOG=.venv/pip.log CACHE=.cache
readonly PYTHONS=(python3 python3.13 python3.12 python3.11 python3.14) # in order of preference
readonly LOCKS=(envs/host.lock envs/torch-cpu.lock envs/torch-cuda.lock)

# What pip says when it finds none of the builds in torch-cpu.lock; the second where a constraints file names torch.
readonly NO_CPU_BUILD='No matching distribution found for torch==|Cannot install torch=='

say() { printf 'setup: [%4d s] %s\n' "$SECONDS" "$*"; }

fail() {
    printf 'setup: ERROR: %s\n' "$1" >&2
    shift
    (($# == 0)) || printf '    %s\n' "$@" >&2
    exit 1
}

has_apt() { command -v apt-get >/dev/null && { ((EUID == 0)) || command -v sudo >/dev/null; }; }

apt_install() {
    local -a root=()
    ((EUID == 0)) || root=(sudo)
    say "installing with apt (a change outside the checkout): $*"
    "${root[@]}" apt-get update -qq || say "apt-get update reported the problem above; going on"
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

# Prints the first Python that the lock covers, or nothing.
find_python() {
    local python
    for python in "${PYTHONS[@]}"; do
        if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
}

choose_python() {
    local version
    python=$(find_python)
    if [[ -z $python ]] && has_apt; then
        for version in 3.13 3.12 3.11; do
            if apt-cache show "python$version-venv" >/dev/null 2>&1; then
                apt_install "python$version" "python$version-venv"
                python=$(find_python)
                break
            fi
        done
    fi
    [[ -n $python ]] ||
        fail "no Python from 3.11 to 3.14 on PATH (python3 is $(python3 --version 2>&1 || true))" \
            "install one of them with its venv module, then run: make setup"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        if has_apt; then apt_install "python$version-venv"; fi
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$python has no venv module" "Debian, Ubuntu: apt-get install python$version-venv; then run: make setup"
    fi
}

# What $INSTALLED holds when the virtual environment is that of this checkout and its locks.
packages_identity() {
    printf 'prefix %s\n' "$PWD/$VENV"
    printf 'python %s\n' "$("$VENV/bin/python" -V 2>&1)"
    sha256sum "${LOCKS[@]}"
}

# What $READY holds when, besides, the Apptainer on PATH was seen to build and run an image.
identity() {
    packages_identity
    printf 'apptainer %s\n' "$(apptainer --version 2>&1)"
}

# pip_install LOCK OPTION...: installs exactly the files of LOCK; what pip complains of goes to $LOG.
pip_install() {
    local lock=$1
    shift
    "$VENV/bin/python" -m pip install --progress-bar off --no-deps --require-hashes "$@" --requirement "$lock" 2>"$LOG" |
        awk -v lock="$lock" -v count="$(grep -c '^[a-z0-9]' "$lock")" '
            /^(Collecting|Processing) / && ++number % 25 == 0 { print "setup: " lock ": " number " of " count " packages"; fflush() }
            /^Installing collected packages/ { print "setup: " lock ": unpacking"; fflush() }'
}

# The CPU build where pip's own configuration leads to it, else the package index's build.
install_torch() {
    if pip_install envs/torch-cpu.lock --only-binary :all:; then
        say "torch: a CPU build"
    elif grep -qE "$NO_CPU_BUILD" "$LOG"; then
        say "torch: pip finds no CPU build here; the package index's build and its CUDA libraries (5 GB on disk)"
        pip_install envs/torch-cuda.lock --only-binary :all: || pip_failed envs/torch-cuda.lock
    else
        pip_failed envs/torch-cpu.lock
    fi
}

pip_failed() { fail "pip could not install $1:" "$(grep -v '^WARNING: Location' "$LOG")"; }

create_venv() {
    say "virtual environment $VENV with $("$python" -V) from envs/host.lock (1 to 5 minutes)"
    rm -f "$READY" "$INSTALLED"
    "$python" -m venv --clear "$VENV"
    # The build tools come first: a few packages ship source only, and building those with the
    # tools of the lock keeps pip from fetching tools without a hash.
    awk '/^[a-z0-9]/ { keep = /^(setuptools|wheel)==/ } keep' envs/host.lock >"$VENV/build-tools.lock"
    pip_install "$VENV/build-tools.lock" --only-binary :all: || pip_failed "$VENV/build-tools.lock"
    pip_install envs/host.lock --no-build-isolation || pip_failed envs/host.lock
    install_torch
    "$VENV/bin/python" -m pip check --quiet || fail "envs/host.lock is not complete: see the lines above"
    packages_identity >"$INSTALLED"
}

main() {
    if [[ $(uname -sm) != "Linux x86_64" ]]; then
        fail "this is $(uname -sm); the locks and the image are for Linux x86_64"
    fi
    if [[ -f $READY ]] && command -v apptainer >/dev/null && [[ "$(identity)" == "$(<"$READY")" ]]; then
        say "ready ($VENV, $(apptainer --version))"
        return
    fi
    local python
    if ! [[ -f $INSTALLED && "$(packages_identity)" == "$(<"$INSTALLED")" ]]; then
        choose_python
        create_venv
    fi
    bash envs/install_apptainer.sh
    say "building and running a tiny image"
    PYTHONPATH=scripts "$VENV/bin/python" -m aerie.container --cache-dir "$CACHE"
    identity >"$READY"
    say "ready ($VENV, $(apptainer --version))"
}

main "$@"
